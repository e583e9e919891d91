"""TreePlanner: which tree pays for the next step, from measured costs and the acceptance measured so far.

A step that emits t tokens in c seconds beats the present rate r (tokens a second) if t - r c > 0, so the plan with the
largest expected t - r c is taken: a level or a node is added as long as the tokens it brings are worth its time at the
rate reached without it. The expected tokens are measured, not taken from the drafter's probabilities (which say little
under coupled drafting at temperature > 0): one step with a large tree tells what every smaller tree would have
accepted, because the accepted nodes' places in the order of scores are known.

All of it runs on the host, on numbers that were read with the emitted tokens.

Legend: P plans, with "no tree" as the first; G groups of confidence, with all confidences together as the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inference.auto_tree import AutoTree
from inference.cost_model import NO_TREE, CostModel, Plan

# Steps of like confidence share their statistics: the drafter's chance of its best root child, cut at these values.
CONFIDENCE_CUTS = (0.15, 0.3, 0.5, 0.7, 0.9)
# After so many further steps a step's weight is 1/e.
MEMORY_STEPS = 128
# Drafting is given up when it is slower than not drafting by this share over the square root of the steps it was seen.
GIVE_UP_MARGIN = 0.25
# Before anything is measured: each further depth is accepted with this chance, counted as so many steps.
PRIOR_CHANCE, PRIOR_STEPS = 0.6, 1.0
# What all confidences together say counts as so many steps of each one.
SHARED_STEPS = 12.0
# The largest tree, which tells about all others, is drafted so often first, and then every so many drafted steps, to
# notice that it would pay.
FIRST_TRIES, EXPLORE_EVERY = 4, 40
# Steps without drafting after drafting did not pay; doubled while it goes on not paying.
SLEEP_STEPS, MAX_SLEEP_STEPS = 8, 128
# Then single drafted steps, as many as it takes to see whether drafting pays: until their mean is off by this share
# over the square root of their number, or there are enough of them.
MIN_PROBES, MAX_PROBES, PROBE_MARGIN = 2, 8, 0.5
# Costs are taken for the same over so many tokens of context.
CONTEXT_STEP = 64
# A step that took longer than expected by more than this (something was compiled, the machine was busy) counts as this.
MAX_SCALE = 2.0


class _Mean:
    """A mean that forgets: begun with a value that counts as `weight` measurements."""

    def __init__(self, value: float, weight: float) -> None:
        self.total, self.weight = value * weight, weight

    def add(self, value: float) -> None:
        keep = 1.0 - 1.0 / MEMORY_STEPS
        self.total, self.weight = self.total * keep + value, self.weight * keep + 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight


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
        self.largest = max(self.plans, key=lambda plan: (plan.num_nodes, plan.depth, plan.width))
        # A probe: one step with a small tree.
        self.smallest = min(policy.plans, key=lambda plan: (abs(plan.depth - 2), plan.num_nodes, plan.width))
        self._index = {plan: index for index, plan in enumerate(self.plans)}
        # Of which plans a step of each one tells: [P], 1 or 0.
        self._tells = {plan: np.array([float(_holds(plan, other)) for other in self.plans]) for plan in self.plans}
        self._prior = PRIOR_STEPS * np.array([_prior(plan) for plan in self.plans])  # [P]
        self._costs: CostModel | None = None
        self._seconds_of: dict[int, NDArray[np.float64]] = {}  # by these costs, [P] for each stretch of context
        # Measured seconds over those of the costs, for steps that ask the drafter and for those that do not.
        self._drafted_scale, self._plain_scale = _Mean(1.0, 1.0), _Mean(1.0, 1.0)
        self._forget()
        self._tokens, self._seconds = _Mean(0.0, 0.0), _Mean(0.0, 0.0)  # of a drafted step and row
        self._drafted_steps = 0
        self._asleep = 0
        self._sleep_steps = SLEEP_STEPS
        self._is_trial = self._is_probe = self._awaits_probe = False
        self._probes: list[tuple[float, float]] = []  # tokens and seconds

    def _forget(self) -> None:
        """Nothing is known of any plan at any confidence."""
        # Accepted tokens, and the steps they were counted in.
        self._counted = np.zeros((2, len(CONFIDENCE_CUTS) + 2, len(self.plans)))  # [2, G, P]
        self._tries = 0

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
            return self.smallest
        self._is_trial = self._tries < FIRST_TRIES or self._drafted_steps % EXPLORE_EVERY == 0
        if self._is_trial:
            self._tries += 1
            return self.largest
        gains = self._expect(confidences) - self._rate(costs, context) * self._step_seconds(costs, context)
        return self.plans[int(gains.argmax())]

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
        tells = self._tells[plan]
        keeps = 1.0 - tells / (MEMORY_STEPS * len(confidences))  # each row of a batch is a measurement
        news = np.zeros((2, len(self.plans)))
        news[1] = tells
        for confidence, row_counted in zip(confidences, counted, strict=True):
            news[0, 1:] = row_counted or 0.0
            news[0] *= tells
            for group in (_group(confidence), -1):
                self._counted[:, group] *= keeps
                self._counted[:, group] += news
        tokens = 1.0 + sum(accepted) / len(accepted)
        expected_seconds = float(self._step_seconds(costs, context)[self._index[plan]])
        if seconds is not None:
            self._drafted_scale.add(_clip(seconds * self._drafted_scale.value / expected_seconds))
        self._judge(tokens, expected_seconds, costs, context)

    def _judge(self, tokens: float, seconds: float, costs: CostModel, context: int) -> None:
        """Whether drafting goes on, after a drafted step."""
        plain = 1.0 / self._plain_seconds(costs, context)
        if self._is_probe:
            self._is_probe = self._awaits_probe = False
            self._probes.append((tokens, seconds))
            number = len(self._probes)
            tokens, seconds = (sum(values) / number for values in zip(*self._probes, strict=True))
            gain = tokens / seconds / plain - 1.0
            if number < MIN_PROBES or (number < MAX_PROBES and abs(gain) < PROBE_MARGIN / math.sqrt(number)):
                self._asleep = 1  # ask again at once
                return
            self._probes.clear()
            if gain > 0.0:
                self._forget()  # this is another text
                self._tokens, self._seconds = _Mean(tokens, number), _Mean(seconds, number)
            else:
                self._sleep()
            return
        if not self._is_trial:  # trials cost more than they bring, and are few
            self._tokens.add(tokens)
            self._seconds.add(seconds)
        steps = self._tokens.weight
        if steps <= SLEEP_STEPS:
            return
        # What drafting has brought, or what the best tree would bring.
        pays = self._tokens.value / self._seconds.value > plain * (1.0 - GIVE_UP_MARGIN / math.sqrt(steps))
        if not pays:
            rates = (1.0 + self._expect_anywhere()) / self._step_seconds(costs, context)
            pays = bool(rates[1:].max() > plain)
        if pays:
            self._sleep_steps = SLEEP_STEPS
        else:
            self._sleep()

    def _sleep(self) -> None:
        self._asleep = self._sleep_steps
        self._sleep_steps = min(2 * self._sleep_steps, MAX_SLEEP_STEPS)

    def learn_plain(self, costs: CostModel, context: int, seconds: float) -> None:
        """Takes in what a step without drafting took."""
        self._plain_scale.add(_clip(seconds / costs.plain_seconds(context)))

    def pass_step(self) -> None:
        """A step without drafting begins."""
        if self._asleep > 0:
            self._asleep -= 1
            self._is_probe = self._asleep == 0

    def _expect_anywhere(self) -> NDArray[np.float64]:
        """Drafted tokens that each plan is expected to accept in a step, all confidences together: [P]."""
        accepted, steps = self._counted[:, -1]
        expected: NDArray[np.float64] = (accepted + self._prior) / (steps + PRIOR_STEPS)
        return expected

    def _expect(self, confidences: Sequence[float]) -> NDArray[np.float64]:
        """The same at these confidences."""
        shared = SHARED_STEPS * self._expect_anywhere()
        expected = np.zeros(len(self.plans))
        for confidence in confidences:
            accepted, steps = self._counted[:, _group(confidence)]
            expected += (accepted + shared) / (steps + SHARED_STEPS)
        return expected / len(confidences)

    def _step_seconds(self, costs: CostModel, context: int) -> NDArray[np.float64]:
        """`CostModel.step_seconds` of each plan as the clock has corrected it, [P]; looked up again when the context
        has grown."""
        if costs is not self._costs:
            self._costs, self._seconds_of = costs, {}
        key = context // CONTEXT_STEP
        if key not in self._seconds_of:
            self._seconds_of[key] = np.array([costs.step_seconds(plan, context) for plan in self.plans])
        return self._seconds_of[key] * self._drafted_scale.value

    def _plain_seconds(self, costs: CostModel, context: int) -> float:
        return costs.plain_seconds(context) * self._plain_scale.value

    def _rate(self, costs: CostModel, context: int) -> float:
        """Tokens a second and row: the present rate, at least that of plain decoding."""
        plain = 1.0 / self._plain_seconds(costs, context)
        return max(plain, self._tokens.value / self._seconds.value) if self._tokens.weight else plain


def _clip(scale: float) -> float:
    return min(max(scale, 1.0 / MAX_SCALE), MAX_SCALE)


def _group(confidence: float) -> int:
    return sum(confidence >= cut for cut in CONFIDENCE_CUTS)


def _holds(plan: Plan, other: Plan) -> bool:
    """Whether what a tree of `plan` accepts tells what `other` would have accepted."""
    return other.depth <= plan.depth and other.num_nodes <= plan.num_nodes and other.width <= plan.width


def _prior(plan: Plan) -> float:
    """Accepted tokens before anything is known; more nodes help a little."""
    share = 1.0 - 0.5 / math.sqrt(plan.num_nodes)
    return share * sum(PRIOR_CHANCE**depth for depth in range(1, plan.depth + 1))
