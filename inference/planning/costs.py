"""StepCosts: what a step with each policy takes beside a plain one, from the times of the steps of texts.

Costs are ratios. The times of one text tell them well, whatever else the machine does and however long the text is:
a policy is tried for a step or two between the steps of another one.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from draftsmith.inference.trees.policy import TreePolicy

Conditions = tuple[bool, int, int]
"""Whether the texts are sampled; the binary orders of magnitude of the rows; half of those of the length."""

LEVEL_COST = 0.15  # a first guess of what drafting a level takes, in plain steps
PRIOR = 0.5  # weight of the guesses: that of a measured step of a policy which takes half a plain step more
SURPRISE = 1.25  # a single time tells at most this multiple of what was expected
NUM_MEASURED = 4  # steps after a change of the policy that tell its cost
OLD = 128  # steps after which what is known beside plain steps is old
NUM_KEPT = 9  # times that a ratio, or the present speed, is the median of: other work adds to some of them


class StepCosts:
    """The costs of policies under all conditions that have occurred. Place 0 of all lists is plain decoding.

    Args:
        policies: without plain decoding.
        node_cost: a first guess of what a node of one row takes, in plain steps.
        stored: ratios that were learned before. The first times that are measured replace them.
    """

    def __init__(
        self, policies: Sequence[TreePolicy], node_cost: float, stored: Mapping[Conditions, Sequence[float]]
    ) -> None:
        self._sizes = [(policy.max_depth, policy.usual_nodes - 1) for policy in policies]
        self._node_cost = node_cost
        self._stored = frozenset(stored)
        self._known = {conditions: [*ratios] for conditions, ratios in stored.items()}
        self._guessed: dict[Conditions, list[float]] = {}  # what was expected before something was measured
        self._measured: dict[Conditions, list[deque[float]]] = {}
        self._at: tuple[Conditions, int] = ((False, 1, 1), 1)  # the present conditions and rows
        self._units: deque[float] = deque(maxlen=NUM_KEPT)  # seconds that the last steps took, in those of a plain one
        self._unit_place = 0  # whose steps those were
        self._num_others = 0  # steps with another policy since then
        self._compared: dict[Conditions, set[int]] = {}  # policies that were measured beside plain steps
        self._since = dict.fromkeys(stored, 8 * OLD)  # steps since one of them was

    def enter(self, *, do_sample: bool, num_rows: int, length: int) -> None:
        """The next step is of so many rows, the longest of which has `length` tokens."""
        conditions = (do_sample, num_rows.bit_length(), length.bit_length() // 2)
        if (conditions, num_rows) == self._at and conditions in self._measured:
            return
        self._at = (conditions, num_rows)
        self._units.clear()
        if conditions not in self._measured:
            if conditions not in self._known:
                self._known[conditions] = self._guess(conditions)
            self._guessed[conditions] = [*self._known[conditions]]
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

    @property
    def age(self) -> float:
        """Steps under the present conditions since something was compared with plain steps; infinite if what runs now
        never was, here or in what was stored. Then its ratio, and those measured beside it, may be wrong."""
        conditions = self._at[0]
        is_known = conditions in self._stored or self._unit_place in self._compared.get(conditions, {0})
        return self._since.get(conditions, 0) if is_known else math.inf

    @property
    def plain_seconds(self) -> float:
        """What a plain step takes at present."""
        return median(self._units)

    def learn(self, place: int, seconds: float) -> None:
        """Takes in a step's time. The first steps after those of another policy tell what the policy in this place
        costs beside that one; later ones tell the present speed."""
        if seconds <= 0.0:  # a clock that is too coarse
            return
        ratios, is_other = self.expect(), place != self._unit_place
        self._since[self._at[0]] = 1 + self._since.get(self._at[0], 0)
        if is_other and self.is_ready and self._num_others < NUM_MEASURED:
            self._num_others += 1
            is_plain = 0 in (place, self._unit_place)
            ratio = seconds / median(self._units)
            if place == 0:  # a plain step is 1: what differs is the policy that the units are of
                place, ratio = self._unit_place, ratios[self._unit_place] / ratio
            if is_plain:
                self._correct(place)
            self._measured[self._at[0]][place].append(ratio)
            self._estimate(ratios)
            return
        if is_other:
            self._units.clear()
        self._unit_place, self._num_others = place, 0
        self._units.append(seconds / ratios[place])

    def _correct(self, place: int) -> None:
        """A policy is measured beside plain steps. The first time this replaces what was measured beside policies that
        were not: all of them may have been wrong together."""
        conditions = self._at[0]
        self._since[conditions] = 0
        compared = self._compared.setdefault(conditions, {0})
        if place not in compared:
            compared.add(place)
            for other, ratios in enumerate(self._measured[conditions]):
                if other == place or other not in compared:
                    ratios.clear()

    def _estimate(self, ratios: list[float]) -> None:
        """The ratios, from what was measured. Policies that have not run miss their guesses as the smaller ones do:
        otherwise a machine whose passes are flatter than the guess would never try its larger trees."""
        guessed, unit = self._guessed[self._at[0]], ratios[self._unit_place]
        added = found = PRIOR
        for place, measured in enumerate(self._measured[self._at[0]]):
            guess = 1.0 + max(0.0, guessed[place] - 1.0) * found / added
            if len(measured) > 1 or place in (0, self._unit_place):
                ratios[place] = median(measured or [ratios[place]])
            else:  # other work only adds to times: a single long one may be by chance
                ratios[place] = min([SURPRISE * guess, *measured]) if measured else guess
            ratios[place] = max(ratios[place], 1.0)  # who drafts verifies, too
            added += len(measured) * max(0.0, guessed[place] - 1.0)
            found += len(measured) * max(0.0, ratios[place] - 1.0)
        scale = unit / ratios[self._unit_place]
        self._units = deque((scale * one for one in self._units), maxlen=NUM_KEPT)

    def learned(self) -> dict[Conditions, list[float]]:
        """The ratios under all conditions under which something was measured."""
        return {conditions: self._known[conditions] for conditions, each in self._measured.items() if any(each)}
