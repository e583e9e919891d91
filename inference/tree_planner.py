"""TreePlanner: which tree pays for the next step, from measured costs and the acceptance measured so far.

A step that emits t tokens in c seconds beats the present rate r (tokens a second) if t - r c > 0, so the plan with the
largest expected t - r c is taken: a level or a node is added as long as the tokens it brings are worth its time at the
rate reached without it. The expected tokens are measured, not taken from the drafter's probabilities (which say little
under coupled drafting at temperature > 0): one step with a large tree tells what every smaller tree would have
accepted, because the accepted nodes' places in the order of scores are known.

All of it runs on the host, on numbers that were read with the emitted tokens.

Legend: N nodes of a tree (root included).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inference.cost_model import NO_TREE, CostModel, Plan

# Steps of like confidence share their statistics: the drafter's chance of its best root child, cut at these values.
CONFIDENCE_CUTS = (0.15, 0.3, 0.5, 0.7, 0.9)
# After so many further steps a step's weight is 1/e.
MEMORY_STEPS = 64
# Drafting is given up when it is slower than not drafting by this share over the square root of the steps it was seen.
GIVE_UP_MARGIN = 0.25
# Before anything is measured: each further depth is accepted with this chance, counted as so many steps.
PRIOR_CHANCE, PRIOR_STEPS = 0.6, 1.0
# The largest tree, which tells about all others, is drafted so often at each confidence first, and then every so many
# drafted steps, to notice that it would pay.
FIRST_TRIES, EXPLORE_EVERY = 4, 40
# Steps without drafting after drafting did not pay; doubled while it goes on not paying.
SLEEP_STEPS, MAX_SLEEP_STEPS = 8, 128
# Then single drafted steps, so many of which must pay in a row before drafting begins again.
PROBES = 2
# Costs are taken for the same over so many tokens of context.
CONTEXT_STEP = 64
# A step that took longer than expected by more than this (something was compiled, the machine was busy) counts as this.
MAX_SCALE = 2.0


def count_accepted(plan: Plan, places: Sequence[int]) -> int:
    """Drafted tokens a tree of this plan would have accepted.

    Args:
        places: for the accepted node of each depth from 1 on, its place (0 = best) in the order of scores among the
            nodes of at most `plan.depth` that a beam of `plan.width` drafts. A parent stands before its children, so
            places rise.
    """
    return sum(place < plan.num_nodes - 1 for place in places[: plan.depth])


@dataclass
class _Mean:
    """A mean that forgets."""

    total: float
    weight: float

    def add(self, value: float) -> None:
        keep = 1.0 - 1.0 / MEMORY_STEPS
        self.total, self.weight = self.total * keep + value, self.weight * keep + 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight


class TreePlanner:
    """Chooses one plan a step; keeps what it has learned from text to text.

    Args:
        plans: the trees to choose from (`AutoTree.plans`).
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = list(plans)
        if not self.plans:
            raise ValueError("no tree of the depths, sizes and widths to choose from exists: allow more or fewer nodes")
        self.largest = max(self.plans, key=lambda plan: (plan.num_nodes, plan.depth, plan.width))
        self._costs: CostModel | None = None
        self._seconds_of: dict[tuple[Plan, int], float] = {}  # by these costs
        # Measured seconds over those of the costs, for steps that ask the drafter and for those that do not.
        self._drafted_scale, self._plain_scale = _Mean(1.0, 1.0), _Mean(1.0, 1.0)
        self._forget()
        self._tokens: _Mean | None = None  # per drafted step and row
        self._seconds = _Mean(0.0, 1.0)
        self._drafted_steps = 0
        self._asleep = 0
        self._sleep_steps = SLEEP_STEPS
        self._is_probe = self._awaits_probe = False
        self._paying_probes = 0

    def _forget(self) -> None:
        """What is expected before anything is measured, for each group of confidences."""
        self._accepted = [
            {plan: _Mean(PRIOR_STEPS * _prior(plan), PRIOR_STEPS) for plan in self.plans}
            for _ in range(len(CONFIDENCE_CUTS) + 1)
        ]

    def begin_text(self) -> None:
        """Another text begins: the outcome of a probe that ended the last one was never learned."""
        self._awaits_probe = False

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
            return min(self.plans, key=lambda plan: (abs(plan.depth - 2), plan.num_nodes, plan.width))
        groups = [self._accepted[_group(confidence)] for confidence in confidences]
        num_tries = min(group[self.largest].weight for group in groups)  # prior included, fading
        if num_tries < FIRST_TRIES or self._drafted_steps % EXPLORE_EVERY == 0:
            return self.largest
        rate = self._rate(costs, context)

        def gain(plan: Plan) -> float:
            accepted = sum(group[plan].value for group in groups) / len(groups) if plan.depth else 0.0
            return 1.0 + accepted - rate * self._step_seconds(costs, plan, context)

        return max([NO_TREE, *self.plans], key=gain)

    def learn(
        self,
        plan: Plan,
        confidences: Sequence[float],
        accepted: Sequence[int],
        places: Sequence[Mapping[tuple[int, int], Sequence[int]]],
        costs: CostModel,
        context: int,
        seconds: float | None = None,
    ) -> None:
        """Takes in what a drafted step of `plan` brought.

        Args:
            confidences: as given to `choose`.
            accepted: drafted tokens each unfinished row accepted.
            places: per row, for each depth and width, what `count_accepted` takes.
            seconds: what it took, if that was measured: a clock knows what costs leave out.
        """
        for confidence, number, row_places in zip(confidences, accepted, places, strict=True):
            group = self._accepted[_group(confidence)]
            for other in self.plans:
                if other.depth <= plan.depth and other.num_nodes <= plan.num_nodes and other.width <= plan.width:
                    group[other].add(count_accepted(other, row_places[other.depth, other.width][:number]))
        tokens = 1.0 + sum(accepted) / len(accepted)
        if seconds is not None:
            self._drafted_scale.add(
                _clip(seconds * self._drafted_scale.value / self._step_seconds(costs, plan, context))
            )
        seconds = self._step_seconds(costs, plan, context)
        if self._tokens is None or self._is_probe:  # a probe speaks for the text as it is now
            self._tokens, self._seconds = _Mean(tokens, 1.0), _Mean(seconds, 1.0)
        else:
            self._tokens.add(tokens)
            self._seconds.add(seconds)
        steps, plain = self._tokens.weight, 1.0 / self._plain_seconds(costs, context)
        if self._is_probe:
            pays = tokens / seconds > plain
        else:  # what drafting has brought or, since trying trees costs, what the best one would bring
            best = self._tokens.value / self._seconds.value
            if best <= plain:
                best = max(self.expected_tokens(p) / self._step_seconds(costs, p, context) for p in self.plans)
            pays = best > plain * (1.0 - GIVE_UP_MARGIN / math.sqrt(steps))
        if self._is_probe and pays:
            self._paying_probes += 1
            if self._paying_probes < PROBES:
                self._asleep = 1  # ask again at once
            else:
                self._forget()  # this is another text
        elif pays and steps > SLEEP_STEPS:
            self._sleep_steps = SLEEP_STEPS
        elif not pays and self._asleep == 0 and (self._is_probe or steps > SLEEP_STEPS):
            self._asleep, self._paying_probes = self._sleep_steps, 0
            self._sleep_steps = min(2 * self._sleep_steps, MAX_SLEEP_STEPS)
        self._is_probe = self._awaits_probe = False

    def learn_plain(self, costs: CostModel, context: int, seconds: float) -> None:
        """Takes in what a step without drafting took."""
        self._plain_scale.add(_clip(seconds / costs.plain_seconds(context)))

    def pass_step(self) -> None:
        """A step without drafting begins."""
        if self._asleep > 0:
            self._asleep -= 1
            self._is_probe = self._asleep == 0

    def expected_tokens(self, plan: Plan) -> float:
        """Tokens a step of this plan is expected to emit, all confidences together."""
        weights = [(group[plan].value, group[plan].weight) for group in self._accepted]
        weights = [pair for pair in weights if pair[1] > PRIOR_STEPS] or weights  # only confidences that were met
        return 1.0 + sum(value * weight for value, weight in weights) / sum(weight for _, weight in weights)

    def _step_seconds(self, costs: CostModel, plan: Plan, context: int) -> float:
        """`CostModel.step_seconds` as the clock has corrected it; looked up again when the context has grown."""
        if costs is not self._costs:
            self._costs, self._seconds_of = costs, {}
        key = (plan, context // CONTEXT_STEP)
        if key not in self._seconds_of:
            self._seconds_of[key] = costs.step_seconds(plan, context)
        return self._seconds_of[key] * self._drafted_scale.value

    def _plain_seconds(self, costs: CostModel, context: int) -> float:
        return costs.plain_seconds(context) * self._plain_scale.value

    def _rate(self, costs: CostModel, context: int) -> float:
        """Tokens a second and row: the present rate, at least that of plain decoding."""
        plain = 1.0 / self._plain_seconds(costs, context)
        return plain if self._tokens is None else max(plain, self._tokens.value / self._seconds.value)


def _clip(scale: float) -> float:
    return min(max(scale, 1.0 / MAX_SCALE), MAX_SCALE)


def _group(confidence: float) -> int:
    return sum(confidence >= cut for cut in CONFIDENCE_CUTS)


def _prior(plan: Plan) -> float:
    """Accepted tokens before anything is known; more nodes help a little."""
    share = 1.0 - 0.5 / math.sqrt(plan.num_nodes)
    return share * sum(PRIOR_CHANCE**depth for depth in range(1, plan.depth + 1))
