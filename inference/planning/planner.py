"""Planner: which of a few trees the next step drafts, or none of them, from what steps took and accepted so far."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter, mul
from pathlib import Path
from statistics import fmean, median

from draftsmith.inference.planning.costs import NUM_KEPT, OLD, StepCosts
from draftsmith.inference.planning.memory import load_learned, store_learned
from draftsmith.inference.trees.batch_tree import BatchTree
from draftsmith.inference.trees.policy import TreePolicy

HOLD = 4  # steps that a choice holds
WINDOW = 128  # rows that means are of, about; in batches, whose rows differ, the root of their number more
MIN_GAIN = 0.03  # drafting begins where it is expected to gain this much over plain decoding
# A policy that has not run lately may be faster than it looks: by HOPE / sqrt(1 + its steps), and the more, the longer
# nothing was tried. Then it is tried for a few steps. Trials may cost this share of the time, and FIRST_TRIALS plain
# steps at the beginning; what is not spent is kept, up to MOST_TRIALS.
HOPE, TRIAL_SHARE, FIRST_TRIALS, MOST_TRIALS = 0.3, 0.01, 1.0, 16.0
# What a token costs is learned from drafts that have read so many at once, since other costs do not depend on them; and
# reading never makes a trial dearer than this many plain steps, so that trials come back whatever was learned.
MANY, DEAREST = 32, 3.0
WARM = 2  # steps after which a policy has graphs and buffers
FEW = 10.0  # a first step that takes so many plain steps more makes no graphs: it is slow by chance
# A batch takes as long as the row that ends last. For each doubling of the rows it is behind the others by this much of
# the spread of what a step accepts, about the root of the accepted tokens. Measured with texts of 64 tokens. The spread
# of a text grows with the root of its drafts, too: those of a trial among plain steps cost more than later ones. The
# same texts say 0.4; so dear, trials come so seldom that trees which gain in simulations are found late.
LAG, LAG_OF_TEXT = 0.06, 0.25
TOKENS_PER_DOUBLING = 0.4  # a first guess: what twice as many nodes accept more
PRIOR_ROWS = 4.0  # that the first guess of accepted tokens weighs as much as
STORE_SECONDS = 10.0  # of a long text what was learned is stored this often


class AcceptedTokens:
    """Tokens of a step with each policy, as the product of ratios to the next smaller policy.

    A step tells what its tree and all smaller ones would have accepted, and nothing about larger ones. These keep their
    ratios, which change less from text to text than numbers of tokens.
    """

    def __init__(self, tokens: Sequence[float]) -> None:
        self.sums = [[PRIOR_ROWS * most, PRIOR_ROWS * few] for few, most in zip([1.0, *tokens], tokens, strict=False)]

    def expect(self) -> list[float]:
        """Tokens a step with each policy emits, after 1.0 for plain decoding."""
        return [1.0, *accumulate((most / few for most, few in self.sums), mul)]

    def learn(self, drafted: int, rows: Sequence[Sequence[int]]) -> None:
        """Takes in how many tokens of each policy rows have accepted in a step with policy `drafted`."""
        window = WINDOW * math.sqrt(len(rows))
        for row in rows:
            for sums, few, most in zip(self.sums[: drafted + 1], [0, *row], row, strict=False):
                for place, accepted in enumerate((most, few)):
                    sums[place] += 1.0 + accepted - sums[place] / window

    def fade(self) -> None:
        """A plain step told nothing. What is known gets old, and in the end weighs as much as WINDOW / 4 tokens."""
        for sums in self.sums:
            shrink = max(1.0 - 1.0 / WINDOW, min(1.0, 0.25 * WINDOW / sums[1]))
            sums[:] = [shrink * one for one in sums]


class Planner:
    """Chooses among nested policies, or none of them; keeps what it has learned from text to text, and in a file.

    It measures nothing by itself: it times the steps of the texts. In the beginning it guesses, takes small trees, and
    tries others when that costs little. Place 0 of all lists is plain decoding.

    Args:
        policies: from small to large; each contains those before it. The last may be a `BatchTree`, for batches.
        file: what other processes have learned; None = nothing is kept.
        node_cost: a first guess of what a node of one row costs, in plain steps.
        clock: seconds.

    Attributes:
        is_counting: whether the present step is to tell what all policies would have accepted.
    """

    def __init__(
        self,
        policies: Sequence[TreePolicy],
        file: Path | None = None,
        *,
        node_cost: float = 0.05,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policies = (None, *policies)
        self._num_nested = nested = sum(not isinstance(policy, BatchTree) for policy in policies)
        self._file, self._clock = file, clock
        costs, tokens = ({}, {}) if file is None else load_learned(file)
        self._costs = StepCosts(policies, node_cost, costs)
        guess = [1.0 + TOKENS_PER_DOUBLING * math.log2(policy.usual_nodes) for policy in policies]
        known = {kind: tokens.get(kind, guess) for kind in (False, True)}
        self._tokens = {kind: AcceptedTokens(each[:nested]) for kind, each in known.items()}
        self._shared = {kind: AcceptedTokens(each[nested:]) for kind, each in known.items()}
        self._stored = clock()
        self._drafted: set[bool] = set()  # kinds of which a step was drafted
        self.is_counting = False
        self._runs = [0] * len(self.policies)  # steps with each policy
        self._seen = [0.0] * len(self.policies)  # the same, of late
        self._first_seconds = [0.0] * len(self.policies)  # of the first step with each
        self._begun: dict[int, float] = {}  # by policy, plain steps that its first step took more than later ones
        self._readings = deque([0.0], maxlen=NUM_KEPT)  # what a token costs that has waited for a draft, in plain steps
        self._num_waiting = 0  # tokens of a row that wait now
        self._best = 0  # the policy that is thought to be the fastest
        self._place = self._last = 0  # this step's policy; the last step's
        self._hold = 0  # steps for which the choice holds
        self._allowance = FIRST_TRIALS  # what trials may cost now, in plain steps
        self.begin(do_sample=False)

    def begin(self, *, do_sample: bool, is_served: bool = False) -> None:
        """The next steps are of other rows. Greedy and sampled steps differ in costs and tokens.

        Args:
            is_served: others take the places of rows that end.
        """
        self._do_sample, self._is_served = do_sample, is_served
        self._last = -1  # the next step is not timed
        self._num_accepted = 0.0  # drafts of a row, in the mean

    def costs(self, num_rows: int, length: int, *, do_sample: bool) -> list[float]:
        """The ratios of costs that the planner decides with under these conditions."""
        self._costs.enter(do_sample=do_sample, num_rows=num_rows, length=length)
        return [*self._costs.expect()]

    def choose(self, num_rows: int, length: int, num_waiting: int = 0) -> TreePolicy | None:
        """The next step's policy; None = plain decoding.

        Args:
            num_rows: rows in the batch; length: tokens in the longest of them.
            num_waiting: tokens of a row that the drafter will have to read before it drafts.
        """
        self._num_waiting = num_waiting
        self._costs.enter(do_sample=self._do_sample, num_rows=num_rows, length=length)
        if self._hold == 0:
            self._decide(num_rows)
        self._hold -= 1
        self._allowance = min(self._allowance + TRIAL_SHARE * self._costs.expect()[self._place], MOST_TRIALS)
        self.is_counting = 0 < self._place <= self._num_nested
        self._started = self._clock()
        return self.policies[self._place]

    def _decide(self, num_rows: int) -> None:
        nested, shared = self._tokens[self._do_sample], self._shared[self._do_sample]
        tokens, costs = [*nested.expect(), *shared.expect()[1:]], self._costs.expect()
        if num_rows == 1:  # nothing to share
            tokens, costs = tokens[: 1 + self._num_nested], costs[: 1 + self._num_nested]
        doublings = 0.0 if self._is_served else math.log2(num_rows)
        means, tokens = tokens, [number - LAG * doublings * math.sqrt(number - 1.0) for number in tokens]
        # What the first step with a policy takes more must pay within a fifth of the steps that were taken so far.
        # Plain decoding, with which all is compared, is always tried.
        first = median(self._begun.values()) if self._begun else 0.0
        firsts = [first if first > FEW and i and not self._runs[i] else 0.0 for i in range(len(costs))]
        share = 5.0 / (WINDOW + sum(self._runs))
        rates = [number / (cost + share * more) for number, cost, more in zip(tokens, costs, firsts, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] < (1.0 + MIN_GAIN * (self._best == 0)) * rates[0]:
            best = 0
        self._best = self._place = best
        self._hold = HOLD
        hope = HOPE * math.sqrt(max(1.0, self._allowance))
        hopes = [rate * (1.0 + hope / math.sqrt(1.0 + seen)) for rate, seen in zip(rates, self._seen, strict=False)]
        # All is compared with plain decoding. So it is tried again whatever it promises.
        if self._costs.age > OLD * rates[best] / rates[0]:
            hopes[0] = math.inf
        trial = max((i for i in range(len(rates)) if i != best), key=hopes.__getitem__)
        is_first = trial == 0 and math.isinf(self._costs.age)
        num_steps = HOLD if is_first else 2 if self._runs[trial] >= WARM else 3
        drafts = self._num_accepted + num_steps * (means[trial] - 1.0)
        lag = LAG_OF_TEXT * doublings * (math.sqrt(drafts) - math.sqrt(self._num_accepted))
        price = num_steps * (costs[trial] - means[trial] / rates[best]) + lag
        if best == 0:
            price += min(max(0.0, median(self._readings)) * self._num_waiting, DEAREST)
        if is_first:
            price = 0.0  # a lasting mistake would cost more
        is_timed = self._last >= 0 and self._costs.is_ready  # not where rows have just changed
        if is_timed and hopes[trial] > rates[best] and price <= self._allowance:
            self._allowance -= max(0.0, price)
            self._place, self._hold = trial, num_steps

    def learn(self, policy: TreePolicy | None, counted: Sequence[Sequence[int]]) -> None:
        """Takes in the outcome of the step just chosen, as soon as the host has read it.

        Args:
            policy: of the step.
            counted: `CandidateTrees.count_accepted` of each row that was unfinished, in any order; of the tree for
                batches, its drafts that each row accepted. Of a plain step it is not read.
        """
        seconds, place = self._clock() - self._started, self.policies.index(policy)
        is_warm = self._runs[place] >= WARM
        # The first step after another one finds other weights in the processor's caches.
        if place == self._last and is_warm:
            if place not in self._begun and seconds > 0.0:
                self._begun[place] = (self._first_seconds[place] / seconds - 1.0) * self._costs.expect()[place]
            self._costs.learn(place, seconds)
        elif place and self._last == 0 and is_warm and self._costs.is_ready and self._num_waiting >= MANY:
            more = seconds / self._costs.plain_seconds - self._costs.expect()[place]
            self._readings.append(more / self._num_waiting)
        if self._runs[place] == 0:
            self._first_seconds[place] = seconds
        self._last = place
        self._runs[place] += 1
        self._seen = [seen * (1.0 - 1.0 / WINDOW) for seen in self._seen]
        self._seen[place] += 1.0
        if not place:
            self._tokens[self._do_sample].fade()
            self._shared[self._do_sample].fade()
        else:
            self._drafted.add(self._do_sample)
            kind, drafted = (self._shared, 0) if place > self._num_nested else (self._tokens, place - 1)
            kind[self._do_sample].learn(drafted, counted)
            if counted:
                self._num_accepted += fmean(map(itemgetter(drafted), counted))
        if self._clock() - self._stored > STORE_SECONDS:
            self.store()

    def store(self) -> None:
        """Writes the file."""
        if self._file is not None:
            both = {kind: (self._tokens[kind], self._shared[kind]) for kind in self._drafted}
            tokens = {kind: [number for each in two for number in each.expect()[1:]] for kind, two in both.items()}
            store_learned(self._file, (self._costs.learned(), tokens))
        self._stored = self._clock()
