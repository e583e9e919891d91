"""TreePlanner: which tree pays for the next step, from measured costs and the acceptance measured so far.

A step that emits t tokens in c seconds beats the present rate r (tokens a second) if t - r c > 0, so the plan with the
largest expected t - r c is taken: a level or a node is added as long as the tokens it brings are worth its time at the
rate reached without it. The expected tokens are measured, not taken from the drafter's probabilities (which say little
under coupled drafting at temperature > 0): one step with a large tree tells what every smaller tree would have
accepted, because the accepted nodes' places in the order of scores are known.

All of it runs on the host, on numbers that were read with the emitted tokens.

Legend: P plans, with "no tree" as the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.planning.auto_tree import AutoTree
from inference.planning.cost_model import NO_TREE, CostModel, Plan
from inference.planning.plan_estimates import AcceptedTokens, Mean, StepSeconds, group_of

# A planner's first steps are plain ones: what they take is what drafting must beat, and the clock knows it best.
FIRST_PLAIN_STEPS = 12
# The largest tree, which tells about all others, is drafted first until so many rows have tried it, and then every so
# many drafted steps, to notice that it would pay.
FIRST_TRIES, EXPLORE_EVERY = 4, 80
# What steps brought is worked in at each of the first steps, and then every so many: Python is slow between passes that
# drive it out of the processor's caches.
SETTLE_AT_ONCE, SETTLE_EVERY = 32, 8
# Drafting goes on while it gains so much, less this share over the square root of the steps it was seen; these are more
# than a few.
KEEP_GAIN, GIVE_UP_MARGIN, JUDGED_STEPS = 0.03, 0.1, 8
# Plain steps are timed again after so many drafted ones, since what they take changes with the machine's load; more
# seldom while drafting gains at least so much.
SURE_GAIN, CHECK_EVERY, CHECK_EVERY_WHEN_SURE, CHECK_STEPS = 0.3, 64, 512, 6
# Steps without drafting after drafting did not pay; doubled while it goes on not paying, halved while it pays.
SLEEP_STEPS, MAX_SLEEP_STEPS = 32, 256
# Then single drafted steps, as many as it takes to see whether drafting pays: until their mean is off by this share
# over the square root of their number, or there are enough of them. Drafting goes on if it gains at least so much.
MIN_PROBES, MAX_PROBES, PROBE_MARGIN = 2, 4, 0.5
WAKE_GAIN = 0.1


@dataclass(frozen=True)
class _Drafted:
    """A drafted step: the arguments of `TreePlanner.learn`."""

    plan: Plan
    confidences: Sequence[float]
    accepted: Sequence[int]
    counted: Sequence[Sequence[int]]
    costs: CostModel
    context: int
    seconds: float | None
    is_trial: bool


class TreePlanner:
    """Chooses one plan a step; keeps what it has learned from text to text.

    Args:
        policy: whose trees there are to choose from.
    """

    def __init__(self, policy: AutoTree) -> None:
        if not policy.plans:
            raise ValueError(
                f"no tree has one of the depths {list(policy.depths)}, sizes {list(policy.sizes)} and widths "
                f"{list(policy.widths)}: a size must exceed the depth, and be no more than the beam drafts"
            )
        self.plans = [NO_TREE, *policy.plans]
        self.largest = max(self.plans, key=_size)
        # A probe: one step with a small tree.
        self.smallest = min(policy.plans, key=lambda plan: (abs(plan.depth - 2), plan.num_nodes, plan.width))
        self.accepted, self.seconds = AcceptedTokens(self.plans), StepSeconds(self.plans)
        self._drafted_steps = 0
        self._asleep = FIRST_PLAIN_STEPS
        self._sleep_steps = SLEEP_STEPS
        self._wakes_to_probe = self._is_trial = self._is_probe = self._awaits_probe = False
        self._unchecked = 0  # drafted steps since plain ones were timed
        self._probes: list[tuple[float, float]] = []  # tokens and seconds
        self._tokens, self._spent = Mean(0.0, 0.0), Mean(0.0, 0.0)  # tokens and seconds of a drafted step and row
        self._tries = self._num_settled = 0
        self._records: list[_Drafted] = []  # still to be worked in
        self._best: list[int] | None = None  # plan for each confidence
        self._first_costs: CostModel | None = None  # the present text's when it began, all rows together
        self._costs: CostModel | None = None  # now
        self._plan = self.smallest  # of the last step that was neither trial nor probe

    def begin_text(self, costs: CostModel) -> None:
        """Another text begins: the outcome of a probe that ended the last one was never learned. Other costs than the
        last text began with (another batch size, another way to draw) make seconds known so far meaningless."""
        self._awaits_probe, self._best = False, None
        if self._first_costs is not None and self._first_costs is not costs:
            self._settle()
            self._tokens, self._spent = Mean(0.0, 0.0), Mean(0.0, 0.0)
            self._probes.clear()
            self._costs = costs
        self.change_costs(costs, 0)
        self._first_costs = costs

    def change_costs(self, costs: CostModel, context: int) -> None:
        """Rows have left the batch, or are back in the next one: steps made so far count with what they would take
        now, and drafting that did not pay is probed at once if it should pay now."""
        old, self._costs = self._costs, costs
        if old is None or old is costs:
            return
        self._settle()
        self._best = None
        self._spent.total *= costs.step_seconds(self._plan, context) / old.step_seconds(self._plan, context)
        ratio = costs.step_seconds(self.smallest, context) / old.step_seconds(self.smallest, context)
        self._probes = [(tokens, spent * ratio) for tokens, spent in self._probes]
        if self._asleep > 1 and self._wakes_to_probe and self._best_gain(costs, context) > WAKE_GAIN:
            self._asleep = 1

    @property
    def is_drafting(self) -> bool:
        """Whether the coming step asks the drafter at all. Without, the drafter catches up later."""
        return self._asleep == 0 and not self._awaits_probe

    def choose(self, costs: CostModel, context: int, confidences: Sequence[float]) -> Plan:
        """The plan of a step whose root children are scored.

        Args:
            context: tokens in the cache.
            confidences: of each unfinished row, the drafter's chance of its best root child.
        """
        self._drafted_steps += 1
        if self._is_probe:  # one step with a small tree, and no other before its outcome is known
            self._awaits_probe = True
            return self.smallest
        self._is_trial = self._tries < FIRST_TRIES or self._drafted_steps % EXPLORE_EVERY == 0
        if self._is_trial:
            self._tries += len(confidences)
            return self._find_trial(costs, context)
        groups = [group_of(confidence) for confidence in confidences]
        if len(groups) > 1:
            return self.plans[int(self._gains(costs, context)[groups].mean(0).argmax())]
        if self._best is None:
            self._best = self._gains(costs, context).argmax(1).tolist()
        return self.plans[self._best[groups[0]]]

    def learn(
        self,
        plan: Plan,
        confidences: Sequence[float],
        accepted: Sequence[int],
        counted: Sequence[Sequence[int]],
        costs: CostModel,
        context: int,
        seconds: float | None = None,
    ) -> None:
        """Takes in what a drafted step of `plan` brought.

        Args:
            confidences: as given to `choose`.
            accepted: drafted tokens each unfinished row accepted.
            counted: per row, `AutoTree.count_accepted`; empty for a step without a tree.
            seconds: what it took, if that was measured: a clock knows what costs leave out.
        """
        self._records.append(_Drafted(plan, confidences, accepted, counted, costs, context, seconds, self._is_trial))
        # Asleep: the step that had begun already when drafting was given up. It is not the probe that ends the sleep.
        is_early = self._num_settled < SETTLE_AT_ONCE
        if self._is_probe or self._asleep > 0 or is_early or len(self._records) >= SETTLE_EVERY:
            self._settle()

    def _settle(self) -> None:
        """Works in what drafted steps brought, and decides whether drafting goes on."""
        if not self._records:
            return
        records, self._records, self._best = self._records, [], None
        self._num_settled += len(records)
        self._unchecked += len(records)
        for record in records:
            self.accepted.add(record.plan, record.confidences, record.counted)
            if record.seconds is not None:
                self.seconds.correct(record.plan, record.costs, record.context, record.seconds)
            tokens = 1.0 + sum(record.accepted) / len(record.accepted)
            spent = self.seconds.of_plan(record.plan, record.costs, record.context)
            if self._is_probe:
                self._judge_probe(tokens, spent, record.costs, record.context)
            elif not record.is_trial:  # trials cost more than they bring, and are few
                self._tokens.add(tokens)
                self._spent.add(spent)
                self._plan = record.plan
        if self._asleep == 0 and self._tokens.weight > JUDGED_STEPS:
            self._judge(records[-1].costs, records[-1].context)

    def _judge_probe(self, tokens: float, spent: float, costs: CostModel, context: int) -> None:
        self._is_probe = self._awaits_probe = False
        self._probes.append((tokens, spent))
        number = len(self._probes)
        tokens, spent = (sum(values) / number for values in zip(*self._probes, strict=True))
        gain = tokens / spent * self.seconds.of_plain(costs, context) - 1.0
        if number < MIN_PROBES or (number < MAX_PROBES and abs(gain) < PROBE_MARGIN / math.sqrt(number)):
            self._asleep = 1  # ask again at once
            return
        self._probes.clear()
        if gain > WAKE_GAIN:
            self._tries = self._num_settled = 0  # this is another text
            self._tokens, self._spent = Mean(tokens, number), Mean(spent, number)
        else:
            self._sleep()

    def _judge(self, costs: CostModel, context: int) -> None:
        """Goes on with what drafting has brought, or with what the best tree would bring."""
        plain = self.seconds.of_plain(costs, context)
        gain = self._tokens.value / self._spent.value * plain - 1.0
        pays = gain > KEEP_GAIN - GIVE_UP_MARGIN / math.sqrt(self._tokens.weight)
        if not pays:
            pays = self._best_gain(costs, context) > KEEP_GAIN
        if not pays:
            self._sleep()
            return
        self._sleep_steps = max(self._sleep_steps // 2, SLEEP_STEPS)
        if self._unchecked >= (CHECK_EVERY if gain < SURE_GAIN else CHECK_EVERY_WHEN_SURE):
            self._asleep, self._wakes_to_probe, self._unchecked = CHECK_STEPS, False, 0

    def _best_gain(self, costs: CostModel, context: int) -> float:
        """What the best tree would bring beside plain decoding."""
        rates = (1.0 + self.accepted.overall()) / self.seconds.of_plans(costs, context)
        return float(rates[1:].max() * self.seconds.of_plain(costs, context) - 1.0)

    def _find_trial(self, costs: CostModel, context: int) -> Plan:
        """The largest plan that would pay if all its depths were accepted: of many rows, the largest of all would take
        longer than it could ever bring."""
        plain, seconds = self.seconds.of_plain(costs, context), self.seconds.of_plans(costs, context)
        plans = [plan for plan, spent in zip(self.plans, seconds, strict=True) if (plan.depth + 1) * plain > spent]
        return max(plans or [self.smallest], key=_size)

    def _sleep(self) -> None:
        self._asleep, self._wakes_to_probe, self._unchecked = self._sleep_steps, True, 0
        self._sleep_steps = min(2 * self._sleep_steps, MAX_SLEEP_STEPS)

    def learn_plain(self, costs: CostModel, context: int, seconds: float) -> None:
        """Takes in what a step without drafting took."""
        self.seconds.correct_plain(costs, context, seconds)
        self._best = None

    def pass_step(self) -> None:
        """A step without drafting begins."""
        if self._asleep > 0:
            self._asleep -= 1
            self._is_probe = self._wakes_to_probe and self._asleep == 0

    def _gains(self, costs: CostModel, context: int) -> NDArray[np.float64]:
        """Expected tokens less what their seconds are worth, for each confidence and plan: [G - 1, P]."""
        return self.accepted.by_confidence() - self._rate(costs, context) * self.seconds.of_plans(costs, context)

    def _rate(self, costs: CostModel, context: int) -> float:
        """Tokens a second and row: the present rate, at least that of plain decoding."""
        plain = 1.0 / self.seconds.of_plain(costs, context)
        return max(plain, self._tokens.value / self._spent.value) if self._tokens.weight else plain


def _size(plan: Plan) -> tuple[int, int, int]:
    return plan.num_nodes, plan.depth, plan.width
