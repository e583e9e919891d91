"""What each plan is expected to accept and to take, learned from the steps made so far.

Legend: P plans, with "no tree" as the first; G groups of confidence, with all confidences together as the last.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inference.planning.cost_model import CostModel, Plan

# Steps of like confidence share their statistics: the drafter's chance of its best root child, cut at these values.
CONFIDENCE_CUTS = (0.15, 0.3, 0.5, 0.7, 0.9)
# After so many further steps a step's weight is 1/e.
MEMORY_STEPS = 128
# Before anything is measured: each further depth is accepted with this chance, counted as so many steps.
PRIOR_CHANCE, PRIOR_STEPS = 0.6, 1.0
# What all confidences together say counts as so many steps of each one.
SHARED_STEPS = 12.0
# Costs are taken for the same over so many tokens of context.
CONTEXT_STEP = 64
# The clock's word on plain steps is the median of the last ones.
PLAIN_STEPS_KEPT = 9
# A step that took longer than expected by more than this (something was compiled, the machine was busy) counts as this.
MAX_SCALE = 2.0


class Mean:
    """A mean that forgets: begun with a value that counts as `weight` measurements."""

    def __init__(self, value: float, weight: float) -> None:
        self.total, self.weight = value * weight, weight

    def add(self, value: float) -> None:
        keep = 1.0 - 1.0 / MEMORY_STEPS
        self.total, self.weight = self.total * keep + value, self.weight * keep + 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight


class AcceptedTokens:
    """Drafted tokens that each plan is expected to accept in a step.

    Args:
        plans: "no tree" first.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        # Of which plans a step of each one tells: [P], 1 or 0.
        self._tells = {plan: np.array([float(_holds(plan, other)) for other in plans]) for plan in plans}
        self._prior = PRIOR_STEPS * np.array([_prior(plan) for plan in plans])  # [P]
        # Accepted tokens, and the steps they were counted in: [2, G, P].
        self._counted = np.zeros((2, len(CONFIDENCE_CUTS) + 2, len(self._prior)))

    def add(self, plan: Plan, confidences: Sequence[float], counted: Sequence[Sequence[int]]) -> None:
        """What each plan but "no tree" would have accepted in the place of a tree of `plan`.

        Args:
            counted: per row, [P - 1], true for plans in nothing larger than the tree's; empty without a tree.
        """
        tells = self._tells[plan]
        keeps = 1.0 - tells / (MEMORY_STEPS * len(confidences))  # each row of a batch is a measurement
        news = np.zeros((2, 1, len(tells)))
        news[1] = tells
        for confidence, row in zip(confidences, counted, strict=True):
            if row:
                news[0, 0, 1:] = row
                news[0] *= tells
            groups = (group_of(confidence), -1)
            self._counted[:, groups] = self._counted[:, groups] * keeps + news

    def overall(self) -> NDArray[np.float64]:
        """All confidences together: [P]."""
        accepted, steps = self._counted[:, -1]
        expected: NDArray[np.float64] = (accepted + self._prior) / (steps + PRIOR_STEPS)
        return expected

    def by_confidence(self) -> NDArray[np.float64]:
        """[G - 1, P]"""
        accepted, steps = self._counted[:, :-1]
        expected: NDArray[np.float64] = (accepted + SHARED_STEPS * self.overall()) / (steps + SHARED_STEPS)
        return expected


class StepSeconds:
    """What steps take: measured costs as the clock has corrected them since.

    Args:
        plans: "no tree" first.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = list(plans)
        self._index = {plan: index for index, plan in enumerate(self.plans)}
        self._costs: CostModel | None = None
        self._known: dict[int, tuple[float, NDArray[np.float64]]] = {}  # by these costs, for stretches of context
        self._drafted_scale = Mean(1.0, 1.0)
        self._plain_scales: deque[float] = deque(maxlen=PLAIN_STEPS_KEPT)
        self._plain_scale: float | None = 1.0  # their median, unless some are new

    def of_plans(self, costs: CostModel, context: int) -> NDArray[np.float64]:
        """Steps that ask the drafter, with a tree of each plan: [P]."""
        return self._look_up(costs, context)[1] * self._drafted_scale.value

    def of_plan(self, plan: Plan, costs: CostModel, context: int) -> float:
        return float(self._look_up(costs, context)[1][self._index[plan]]) * self._drafted_scale.value

    def of_plain(self, costs: CostModel, context: int) -> float:
        """A step that does not ask the drafter."""
        if self._plain_scale is None:
            self._plain_scale = statistics.median(self._plain_scales)
        return self._look_up(costs, context)[0] * self._plain_scale

    def correct(self, plan: Plan, costs: CostModel, context: int, seconds: float) -> None:
        """A step of `plan` took so long."""
        expected = float(self._look_up(costs, context)[1][self._index[plan]])
        self._drafted_scale.add(_clip(seconds / expected))

    def correct_plain(self, costs: CostModel, context: int, seconds: float) -> None:
        self._plain_scales.append(_clip(seconds / self._look_up(costs, context)[0]))
        self._plain_scale = None

    def _look_up(self, costs: CostModel, context: int) -> tuple[float, NDArray[np.float64]]:
        """Seconds of a plain step, and of each plan's [P], as the costs have them."""
        if costs is not self._costs:
            self._costs, self._known = costs, {}
        key = context // CONTEXT_STEP
        if key not in self._known:
            seconds = np.array([costs.step_seconds(plan, context) for plan in self.plans])
            self._known[key] = costs.plain_seconds(context), seconds
        return self._known[key]


def group_of(confidence: float) -> int:
    return bisect.bisect_right(CONFIDENCE_CUTS, confidence)


def _clip(scale: float) -> float:
    return min(max(scale, 1.0 / MAX_SCALE), MAX_SCALE)


def _holds(plan: Plan, other: Plan) -> bool:
    """Whether what a tree of `plan` accepts tells what `other` would have accepted."""
    return other.depth <= plan.depth and other.num_nodes <= plan.num_nodes and other.width <= plan.width


def _prior(plan: Plan) -> float:
    """Accepted tokens before anything is known; more nodes help a little."""
    share = 1.0 - 0.5 / math.sqrt(plan.num_nodes)
    return share * sum(PRIOR_CHANCE**depth for depth in range(1, plan.depth + 1))
