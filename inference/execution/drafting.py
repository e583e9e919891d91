"""Drafting: one call's drafting, from step to step. It holds what became certain until the drafter takes it in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from inference.acceptance.sampler import Sampler
from inference.cache.tree_cache import TreeCache
from inference.drafters.slots import NewSlots, join_slots
from inference.execution.step import DecodeStep
from inference.trees.policy import TreePolicy
from inference.trees.token_tree import TokenTree


class TreeChoice:
    """Chooses the policy that drafts the next tree. This one always takes the same; `planning` has the other."""

    def __init__(self, policy: TreePolicy | None) -> None:
        self.policy = policy

    def begin(self, step: DecodeStep, sampler: Sampler, batch_size: int) -> None:
        """Another text (batch) begins."""

    def choose(self, num_rows: int, length: int) -> TreePolicy | None:
        """The next step's policy; None = plain decoding.

        Args:
            num_rows: rows in the batch; length: tokens in the longest of them.
        """
        return self.policy

    def learn(self, accepted: Sequence[int], counted: Sequence[Sequence[int]], seconds: float | None) -> None:
        """Takes in the outcome of the last step.

        Args:
            accepted: drafted tokens that each unfinished row accepted.
            counted: for each of them, what `TreePolicy.count_accepted` says; empty for a step without a tree.
            seconds: what the step took, if a clock saw it whole and nothing was compiled in it.
        """


class Drafting:
    """One call's drafting.

    Args:
        state: the drafter's; None without one.

    Attributes:
        has_taken_all: whether the last `draft` handed all certain slots to the drafter. Steps without drafting leave
            them as arrears.
    """

    def __init__(self, step: DecodeStep, choice: TreeChoice, state: Any) -> None:
        self.step, self.choice, self.state = step, choice, state
        self.has_taken_all = False
        self._waiting: list[NewSlots] = []
        self._began: float | None = None  # the last step, on the clock
        self._compiled = 0.0  # seconds of compiling until then

    def take(self, slots: NewSlots) -> None:
        """Slots that became certain."""
        self._waiting.append(slots)

    def draft(self, cache: TreeCache, sampler: Sampler) -> tuple[TokenTree, Tensor | None]:
        """The next step's tree, and its noise [B, P, V] (None when greedy)."""
        policy = self.choice.choose(cache.batch_size, cache.length_bound)
        self.has_taken_all = policy is not None
        if policy is None:
            newest = self._waiting[-1]
            self._waiting = self._waiting if self.step.drafter is not None else []
            return self.step.draft_nothing(cache, sampler, newest)
        slots = join_slots(self._waiting, self.step.num_depths)
        self._waiting = []
        return self.step.draft(self.state, cache, sampler, slots, policy)

    def learn(self, accepted: Sequence[int], counted: Sequence[Sequence[int]]) -> None:
        """Tells the choice what the last step brought (see `TreeChoice.learn`)."""
        now, compiled = time.perf_counter(), self.step.executor.compile_seconds
        is_whole = self._began is not None and compiled == self._compiled
        self.choice.learn(accepted, counted, now - (self._began or now) if is_whole else None)
        self._began, self._compiled = now, compiled

    def retire(self, active: Tensor) -> None:
        """Rows whose `active` [B] is 0 have finished and stay in the batch."""
        self._waiting = [slots.masked(active) for slots in self._waiting]

    def keep_rows(self, places: Sequence[int], cache: TreeCache, num_taken: Sequence[int]) -> None:
        """The batch consists of these of its rows only, of which the drafter holds `num_taken` slots each."""
        self._waiting = [slots.select(places) for slots in self._waiting]
        self.state = self.step.copy_state(cache, self.state, places, num_taken)
        self._began = None  # copying rows is part of no step
