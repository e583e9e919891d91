"""Texts decoded by a planner without models: costs are functions, and acceptance is drawn from a generator."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.inference.planning.planner import Planner
from draftsmith.inference.trees.policy import TreePolicy

Cost = Callable[[int, int, int], float]
"""Seconds of a step with the policy in a place (0: none), with so many rows, and so many tokens in the longest."""


@dataclass
class Simulation:
    """Decodes texts. Row r accepts the next level with `chances[place]` to the power of 1 + its difficulty.

    Args:
        chances: of each policy that the drafted token at a level is accepted, rising.
        node_cost: as in `Planner`.
        extra: seconds that the first step with a policy takes more, to make its graphs.
        reading: seconds that a draft takes more for each token since the last one, or in the prompt of 50 tokens.
        change: seconds that a draft takes more after a plain step.
        noise: the spread of times; one step of twenty takes up to three times as long.

    Attributes:
        seconds, tokens: of all texts, without the noise.
        drafted: steps with each policy.
    """

    policies: Sequence[TreePolicy]
    cost: Cost
    chances: Sequence[float]
    noise: float = 0.06
    seed: int = 0
    file: Path | None = None
    node_cost: float = 0.05
    extra: float = 0.0
    reading: float = 0.0
    change: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    drafted: Counter[Any] = field(default_factory=Counter)
    begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.now = 0.0
        self.random = random.Random(self.seed)
        self.planner = Planner(self.policies, self.file, node_cost=self.node_cost, clock=lambda: self.now)

    def decode(self, num_rows: int = 1, *, num_tokens: int = 64, fixed: int | None = None) -> None:
        """One text, or batch. Rows that have ended leave.

        Args:
            fixed: the place of the policy that drafts every step, instead of the planner's choice.
        """
        left = [num_tokens] * num_rows
        difficulties = [self.random.uniform(0.6, 1.6) for _ in left]
        self.planner.begin(do_sample=False)
        waiting = 50
        while left:
            length = 50 + num_tokens - min(left)
            policy = self.planner.choose(len(left), length, waiting) if fixed is None else [None, *self.policies][fixed]
            place = 0 if policy is None else 1 + self.policies.index(policy)
            seconds = self.cost(place, len(left), length) + (0.0 if place in self.begun else self.extra)
            seconds += self.reading * waiting + self.change * (waiting > 1) if place else 0.0
            waiting = 1 if place else waiting + 1
            self.drafted[place] += 1
            self.begun.add(place)
            self.seconds += seconds
            slowed = self.random.uniform(1.0, 3.0) if self.random.random() < 0.05 else 1.0
            self.now += seconds * slowed * max(0.5, self.random.gauss(1.0, self.noise))
            rows = [self._accept(difficulty) for difficulty in difficulties]
            if fixed is None:
                shown = [row[:place] + [0] * (len(row) - place) for row in rows]
                self.planner.learn(policy, shown if place else [[]] * len(rows))
            emitted = [1 + (row[place - 1] if place else 0) for row in rows]
            self.tokens += sum(min(pair) for pair in zip(emitted, left, strict=True))
            left = [a - b for a, b in zip(left, emitted, strict=True)]
            difficulties = [one for one, more in zip(difficulties, left, strict=True) if more > 0]
            left = [more for more in left if more > 0]

    def _accept(self, difficulty: float) -> list[int]:
        """Levels of each policy's tree that a row accepts: the same luck for all."""
        luck = [self.random.random() for _ in range(self.policies[-1].max_depth)]
        accepted = []
        for policy, chance in zip(self.policies, self.chances, strict=True):
            fits = [one < chance**difficulty for one in luck[: policy.max_depth]]
            accepted.append(fits.index(False) if False in fits else len(fits))
        return accepted
