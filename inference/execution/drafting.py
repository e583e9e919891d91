"""Drafting: makes one call's trees, and holds certain slots until the drafter takes them in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.cache.tree_cache import TreeCache
from draftsmith.inference.drafters.slots import NewSlots, join_slots
from draftsmith.inference.execution.step import DecodeStep
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.token_tree import TokenTree

# Tokens of a row that may wait for the drafter while nothing is drafted: it costs one pass in so many plain steps.
CATCH_UP = 32


class TreeChoice:
    """Chooses the policy that drafts the next tree. This one always takes the same; `planning` has the other.

    Attributes:
        chosen: the policy of the present step.
    """

    is_counting = False  # whether `learn` is to hear what all candidates would have accepted in the step just chosen

    def __init__(self, policy: TreePolicy | None) -> None:
        self.chosen = policy

    def begin(self, *, do_sample: bool) -> None:
        """The next steps are of other rows."""

    def choose(self, num_rows: int, length: int) -> TreePolicy | None:
        """The next step's policy; None = plain decoding.

        Args:
            num_rows: rows in the batch; length: tokens in the longest of them.
        """
        return self.chosen

    def learn(self, policy: TreePolicy | None, counted: Sequence[Sequence[int]], left: Sequence[int]) -> None:
        """Takes in the outcome of the step just chosen, as soon as the host has read it.

        Args:
            counted: `TreePolicy.count_accepted` of each row that was unfinished, in any order; empty lists after a step
                that is not counted.
            left: the tokens that each of these rows had to go.
        """


class Drafting:
    """One call's drafting.

    Args:
        state: the drafter's; None without one.

    Attributes:
        has_taken_all: whether the last `draft` handed all certain slots to the drafter. Steps without drafting let up
            to `CATCH_UP` of them wait.
    """

    def __init__(self, step: DecodeStep, choice: TreeChoice, state: Any) -> None:
        self.step, self.choice, self.state = step, choice, state
        self.has_taken_all = False
        self._waiting: list[NewSlots] = []
        self._active: Tensor | None = None  # [B], 0 for finished rows

    def take(self, slots: NewSlots) -> None:
        """Slots that became certain."""
        self._waiting.append(slots)

    def draft(self, cache: TreeCache, sampler: Sampler) -> tuple[TokenTree, Tensor | None]:
        """The next step's tree, and its noise [B, P, V] (None when greedy)."""
        policy = self.choice.choose(cache.batch_size, cache.length_bound)
        if policy is not None:
            return self.step.draft(self.state, cache, sampler, self._take_waiting(), policy)
        newest = self._waiting[-1]
        self.has_taken_all = False
        if self.step.drafter is None:
            self._waiting = []
        elif sum(slots.width for slots in self._waiting) >= CATCH_UP:
            self.step.catch_up(self.state, cache, self._take_waiting())
        else:
            self._waiting = [*self._waiting[:-1], newest.map(self.step.executor.keep)]
        return self.step.draft_nothing(cache, sampler, newest)

    def _take_waiting(self) -> NewSlots:
        """All slots that wait. The drafter is about to read them."""
        slots = join_slots(self._waiting, self.step.least_slots)
        if self._active is not None:
            slots = replace(slots, counts=slots.counts * self._active)
        self._waiting, self.has_taken_all = [], True
        return slots

    def retire(self, active: Tensor) -> None:
        """Rows whose `active` [B] is 0 have finished and stay in the batch."""
        self._active = active

    def add_rows(self, other: Any, slots: NewSlots, cache: TreeCache, *, max_slots: int) -> None:
        """Rows of the drafter's state `other`, which has read all their certain slots but `slots`, have come after the
        rows of the batch in its cache."""
        self.step.add_rows(cache, self.state, other, max_slots=max_slots)
        nothing = replace(slots, counts=torch.zeros_like(slots.counts))
        self._waiting = [*(one.add(nothing) for one in self._waiting[:-1]), self._waiting[-1].add(slots)]

    def keep_rows(self, places: Sequence[int], cache: TreeCache) -> None:
        """Row i becomes the present row places[i] >= i. The other rows have left the batch, and its cache."""
        self._waiting = [slots.select(places) for slots in self._waiting]
        self.step.keep_rows(cache, self.state, places)
        self._active = None
