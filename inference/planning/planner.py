"""TreePlanner: which tree is worth drafting, from measured costs and measured acceptance.

A step with a tree that is expected to emit t tokens in c seconds decodes at t / c tokens a second. The planner takes
the fastest candidate, or plain decoding, and chooses again every few steps. The expected tokens are measured, not taken
from the drafter's probabilities (which say little under coupled drafting at temperature > 0): one step with a large
tree tells how many tokens every smaller tree would have accepted (`AutoTree.count_accepted`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.planning.accepted_lengths import AcceptedLengths
from draftsmith.inference.planning.choice import TreeChoice
from draftsmith.inference.planning.costs import StepCosts, find_costs
from draftsmith.inference.request.processors import PREFIX_FREE
from draftsmith.inference.step import Step
from draftsmith.inference.trees.policy import TreePolicy

# Steps that a choice holds.
CHOICE_STEPS = 16
# A step tells nothing about trees that its tree does not contain. So the largest tree is drafted first, until this many
# rows have shown how much it accepts.
FIRST_TRIALS = 8
# Later other trees are tried for one step now and then, and where drafting does not gain the best tree for a few, since
# texts change. Trials may cost this share of the time.
TRIAL_SHARE, PROBE_STEPS = 0.01, 2
# The tree that is tried is the one that would be fastest with HOPE / sqrt(rows it was seen on) more tokens. HOPE is
# about the spread of the difference between two trees in one step.
HOPE = 0.5
# Drafting must be expected to gain this much over plain decoding: by itself, and in a batch, whose rows then end at
# different times and leave the others with steps that cost nearly as much (at 4 and 16 rows about 15% of the time).
MIN_GAIN, MIN_BATCH_GAIN = 0.03, 0.15
# A probe weighs as much as this many rows before it.
PROBE_WINDOW = 8
# Costs are doubted when the fastest of so many steps with a tree (or without one) took this factor more or less. Other
# work on the machine slows down many steps, but seldom all of them.
COMPARED_STEPS, MOST_APART = 64, 1.5
# A tree whose cost in plain steps exceeds this share of the most tokens it can emit is never worth it.
MOST_ACCEPTED = 0.8


class TreePlanner(TreeChoice):
    """Chooses among a policy's candidates, or none of them; keeps what it has learned from text to text."""

    is_fixed = False

    def __init__(self, policy: TreePolicy) -> None:
        super().__init__(policy)
        self.trees = policy.candidates
        # Greedy and sampled texts accept differently.
        self._learned = {do_sample: AcceptedLengths(self.trees) for do_sample in (False, True)}
        self._do_sample = False  # the present text's kind
        self._lengths = self._learned[False]
        self.accepted = [0.0] * len(self.trees)  # drafted tokens that each candidate is expected to accept
        self._costs: dict[tuple[object, ...], StepCosts] = {}
        self._by_kind: dict[bool, dict[int, StepCosts]] = {}  # by `do_sample` and batch size
        self._by_rows: dict[int, StepCosts] = {}  # of the present kind
        self._doubted: set[StepCosts] = set()
        self._confirmed: set[StepCosts] = set()  # measured again, with the same result: steps differ for other reasons
        self._ratios: dict[tuple[bool, int | None], list[float]] = {}  # seconds that steps took, in those expected
        self._chosen: int | None = None  # the present choice: an index, or None for plain decoding
        self._best = 0  # the last choice of several steps
        self._num_rows = 0  # that the choice was made for
        self._steps_left = 0
        self._is_probe = False  # whether the present choice is a trial of several steps
        self._trial_seconds = 0.0  # that trials may cost now
        self._started, self._expected = 0.0, 0.0  # of the present step: when, and for how many seconds

    def begin(self, step: Step, sampler: Sampler, batch_size: int) -> None:
        # Finished rows leave; costs in between are interpolated.
        sizes = {batch_size, 1} if step.rows_may_leave else {batch_size}
        self._is_probe = False
        self._by_kind[sampler.do_sample] = {size: self.find_costs(step, sampler, size) for size in sizes}
        self.change(do_sample=sampler.do_sample)

    def change(self, *, do_sample: bool) -> None:
        self._do_sample = do_sample
        self._lengths, self._by_rows = self._learned[do_sample], self._by_kind[do_sample]
        self._num_rows = 0  # they may have other costs

    def find_costs(self, step: Step, sampler: Sampler, batch_size: int) -> StepCosts:
        """Costs for texts drawn like the sampler's, measured or read when first asked for, and when they are due."""
        processors = [processor for processor in sampler.processors if type(processor) in PREFIX_FREE]
        key = (batch_size, sampler.do_sample, *map(type, processors))
        held = self._costs.get(key)
        if held is None or held.is_due(self._doubted):
            seeds = row_seeds(0, batch_size, step.target.device) if sampler.do_sample else None
            blank = Sampler(processors, do_sample=sampler.do_sample, row_seeds=seeds)
            found = self._costs[key] = find_costs(step, batch_size, blank, self._doubted)
            if held in self._doubted and _agree(held, found):
                self._confirmed.add(found)
            self._doubted -= {held}
        return self._costs[key]

    def choose(self, num_rows: int, length: int) -> TreePolicy | None:
        if self._steps_left == 0 or (num_rows != self._num_rows and not self._is_probe):
            self._chosen, self._steps_left = self._decide(num_rows, length)
        self._num_rows = num_rows
        self._steps_left -= 1
        # As many outcomes as one row has steps are enough to learn from.
        self.is_counting = self._chosen is not None and self._steps_left % num_rows == 0
        self._expected, self._started = self._seconds(self._chosen, num_rows, length), time.perf_counter()
        return None if self._chosen is None else self.trees[self._chosen]

    def _decide(self, num_rows: int, length: int) -> tuple[int | None, int]:
        """The next choice, and for how many steps it holds. When rows have changed, it holds for the steps that are
        left, so that trials get their share of the time only."""
        is_new, num_steps = self._steps_left == 0, self._steps_left or CHOICE_STEPS
        self._is_probe = False
        plain = self._seconds(None, num_rows, length)
        seconds = [self._seconds(index, num_rows, length) for index in range(len(self.trees))]
        affordable = [i for i, s in enumerate(seconds) if s < MOST_ACCEPTED * (self.trees[i].max_depth + 1) * plain]
        chosen: int | None = None
        if affordable:
            if untried := [i for i in affordable if self._lengths.counts[i] < FIRST_TRIALS]:
                self._best = max(untried, key=lambda i: (self.trees[i].num_nodes, self.trees[i].max_depth))
                return self._best, 1
            self.accepted = self._lengths.estimate(self._best)
            best = self._best = max(affordable, key=lambda i: (1.0 + self.accepted[i]) / seconds[i])
            gain = plain * (1.0 + self.accepted[best]) / seconds[best] - 1.0
            if gain > (MIN_GAIN if num_rows == 1 else MIN_BATCH_GAIN):
                chosen = best
                if is_new and (trial := self._find_trial(best, affordable, seconds)) is not None:
                    return trial, 1
            elif is_new and self._may_cost(PROBE_STEPS * (seconds[best] - plain * (1.0 + self.accepted[best]))):
                self._lengths.forget(PROBE_WINDOW)
                self._is_probe = True
                return best, PROBE_STEPS
        if is_new:
            self._trial_seconds += TRIAL_SHARE * CHOICE_STEPS * (plain if chosen is None else seconds[chosen])
        return chosen, num_steps

    def _find_trial(self, best: int, affordable: Sequence[int], seconds: Sequence[float]) -> int | None:
        """The tree to try for a step, if there is one that trials may cost now."""
        others = [i for i in affordable if not self.trees[best].contains(self.trees[i])]
        if not others:
            return None
        hopes = {i: (1.0 + self.accepted[i] + HOPE / self._lengths.weights[i] ** 0.5) / seconds[i] for i in others}
        trial = max(others, key=lambda i: hopes[i])
        # The best tree takes so much less time for as many tokens.
        cost = seconds[trial] - seconds[best] * (1.0 + self.accepted[trial]) / (1.0 + self.accepted[best])
        return trial if self._may_cost(cost) else None

    def _may_cost(self, seconds: float) -> bool:
        """Whether trials may cost this now; then it is spent. Never twice without a choice in between."""
        if self._trial_seconds <= 0.0 or seconds > self._trial_seconds:
            return False
        self._trial_seconds = min(self._trial_seconds - seconds, 0.0)
        return True

    def _seconds(self, index: int | None, num_rows: int, length: int) -> float:
        """Of a step with this tree (None: without one); linear in the number of rows, between the two measured."""
        few, many = min(self._by_rows), max(self._by_rows)
        low, high = (self._by_rows[size].seconds(index, length) for size in (few, many))
        return low if many == few else low + (high - low) * (num_rows - few) / (many - few)

    def learn(self, counted: Sequence[Sequence[int]], left: Sequence[int]) -> None:
        self._compare(time.perf_counter() - self._started)
        if self._chosen is not None:
            # A batch takes as long as its slowest rows: larger trees would look better from those that end early.
            slowest = sorted(zip(left, counted, strict=True), key=lambda one: -one[0])[: (len(counted) + 1) // 2]
            self._lengths.learn(self._chosen, [row for _, row in slowest])

    def _compare(self, seconds: float) -> None:
        """Doubts the present costs if steps do not take so long."""
        ratios = self._ratios.setdefault((self._do_sample, self._chosen), [])
        ratios.append(seconds / self._expected)
        if len(ratios) == COMPARED_STEPS:
            if not 1 / MOST_APART < min(ratios) < MOST_APART:
                self._doubted |= {*self._by_rows.values()} - self._confirmed
            ratios.clear()


def _agree(costs: StepCosts, others: StepCosts) -> bool:
    pairs = zip((*costs.plain, *costs.largest), (*others.plain, *others.largest), strict=True)
    return all(1 / MOST_APART < one / other < MOST_APART for one, other in pairs)
