"""StepCosts: what a step with each policy takes beside a plain one, from the times of the steps of texts.

Costs are ratios. The times of one text tell them well, whatever else the machine does and however long the text is:
a policy is tried for a step or two between the steps of another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from draftsmith.inference.trees.policy import TreePolicy

Conditions = tuple[bool, int, int]
"""Whether the texts are sampled; the binary orders of magnitude of the rows; half of those of the length."""

LEVEL_COST = 0.15  # a first guess of what drafting a level takes, in plain steps
NUM_MEASURED = 4  # steps after a change of the policy that tell its cost
NUM_KEPT = 9  # times that a ratio, or the present speed, is the median of: other work adds to some of them


class StepCosts:
    """The costs of policies under all conditions that have occurred. Place 0 of all lists is plain decoding.

    Args:
        policies: without plain decoding.
        node_cost: a first guess of what a node of one row takes, in plain steps.
    """

    def __init__(self, policies: Sequence[TreePolicy], node_cost: float) -> None:
        self._sizes = [(policy.max_depth, policy.num_nodes - 1) for policy in policies]
        self._node_cost = node_cost
        self._known: dict[Conditions, list[float]] = {}
        self._measured: dict[Conditions, list[deque[float]]] = {}
        self._at: tuple[Conditions, int] = ((False, 1, 1), 1)  # the present conditions and rows
        self._units: deque[float] = deque(maxlen=NUM_KEPT)  # seconds that the last steps took, in those of a plain one
        self._unit_place = 0  # whose steps those were
        self._num_others = 0  # steps with another policy since then

    def enter(self, *, do_sample: bool, num_rows: int, length: int) -> None:
        """The next step is of so many rows, the longest of which has `length` tokens."""
        conditions = (do_sample, num_rows.bit_length(), length.bit_length() // 2)
        if (conditions, num_rows) == self._at and conditions in self._measured:
            return
        self._at = (conditions, num_rows)
        self._units.clear()
        if conditions not in self._measured:
            self._known[conditions] = self._guess(conditions)
            self._measured[conditions] = [deque(maxlen=NUM_KEPT) for _ in range(1 + len(self._sizes))]

    def _guess(self, conditions: Conditions) -> list[float]:
        """From the nearest known conditions."""
        simple = self._guess_simply(conditions)
        if not self._known:
            return simple
        nearest = min(self._known, key=lambda one: sum(abs(a - b) for a, b in zip(one, conditions, strict=True)))
        ratios = zip(self._known[nearest], simple, self._guess_simply(nearest), strict=True)
        return [known * here / there for known, here, there in ratios]

    def _guess_simply(self, conditions: Conditions) -> list[float]:
        return [1.0, *(1.0 + LEVEL_COST * d + self._node_cost * n * conditions[1] for d, n in self._sizes)]

    def expect(self) -> list[float]:
        """The ratios under the present conditions."""
        return self._known[self._at[0]]

    @property
    def is_ready(self) -> bool:
        """Whether the present speed is known, so that a trial tells something."""
        return len(self._units) > 1

    def learn(self, place: int, seconds: float) -> None:
        """Takes in a step's time. The first steps after those of another policy tell what the policy in this place
        costs beside that one; later ones tell the present speed."""
        ratios, is_other = self.expect(), place != self._unit_place
        if is_other and self.is_ready and self._num_others < NUM_MEASURED:
            self._num_others += 1
            measured = self._measured[self._at[0]][place]
            measured.append(seconds / median(self._units))
            ratios[place] = median(measured)
            return
        if is_other:
            self._units.clear()
        self._unit_place, self._num_others = place, 0
        self._units.append(seconds / ratios[place])
