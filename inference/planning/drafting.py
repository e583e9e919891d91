"""How a step comes by its tree: of one size always, or of a size chosen at every step.

The loop hands over what became certain (`take`), lets the drafter begin (`open`), reads the host's copy of everything
at the step's one synchronisation, and then asks for the tree (`draft`).

Legend: B batch, X extra columns to read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from inference.acceptance.exact import Sampler
from inference.cache.tree_cache import TreeCache
from inference.execution.step import CHANCE_UNIT, DecodeStep, NewSlots, OpenedDraft
from inference.planning.auto_tree import AutoTree
from inference.planning.cost_model import NO_TREE, BatchCosts, Plan
from inference.planning.tree_planner import TreePlanner
from inference.trees.token_tree import TokenTree


class Drafting(Protocol):
    """One text's (batch's) drafting.

    Attributes:
        state: the drafter's.
        has_taken_all: since the last `draft`, the drafter has every slot that was certain then.
    """

    state: Any

    @property
    def has_taken_all(self) -> bool: ...

    def take(self, slots: NewSlots, counted: Tensor | None = None) -> None:
        """What became certain; and, after a step with a chosen tree, `AutoTree.count_accepted` of its path."""

    def open(self, cache: TreeCache, sampler: Sampler) -> Tensor | None:
        """Begins to draft; returns [B, X] long for the host to read."""

    def draft(
        self, cache: TreeCache, sampler: Sampler, columns: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> tuple[TokenTree, Tensor | None]:
        """The tree and the step's noise.

        Args:
            columns: per row, what `open` asked for; counts: per row, tokens the last step emitted (0: finished).
        """

    def retire(self, active: Tensor) -> None:
        """Rows whose `active` [B] is 0 have finished."""

    def keep_rows(self, places: Sequence[int], state: Any) -> None:
        """Between `take` and `open`: the batch consists of these of its rows only, and `state` is theirs."""


class FixedDrafting:
    """One policy's trees, or none at all."""

    def __init__(self, step: DecodeStep, state: Any) -> None:
        self.step = step
        self.state = state
        self.has_taken_all = step.drafter is not None

    def take(self, slots: NewSlots, counted: Tensor | None = None) -> None:
        self.slots = slots

    def open(self, cache: TreeCache, sampler: Sampler) -> Tensor | None:
        return None

    def retire(self, active: Tensor) -> None:
        self.slots.counts = self.slots.counts * active

    def keep_rows(self, places: Sequence[int], state: Any) -> None:
        self.slots, self.state = self.slots.select(places), state

    def draft(
        self, cache: TreeCache, sampler: Sampler, columns: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> tuple[TokenTree, Tensor | None]:
        return self.step.draft(self.state, cache, sampler, self.slots)


class AdaptiveDrafting:
    """Trees of the sizes that pay. The drafter scores the root's children before the synchronisation, so that its
    confidence is known when the size is chosen; while drafting does not pay it is not asked, and catches up later.

    Args:
        costs: for the sizes the batch may shrink to.
        batch_size: rows it begins with.
    """

    def __init__(
        self,
        step: DecodeStep,
        policy: AutoTree,
        planner: TreePlanner,
        costs: BatchCosts,
        state: Any,
        batch_size: int,
    ) -> None:
        assert step.drafter is not None
        self.step, self.policy, self.planner = step, policy, planner
        self.state = state
        self._costs_by_size, self.costs = costs, costs.at(batch_size)
        planner.begin_text(self.costs)
        self._waiting: list[NewSlots] = []
        self._active: Tensor | None = None  # [B], 0 for rows that have finished
        self._counted: Tensor | None = None
        self._opened: OpenedDraft | None = None
        self._plan: Plan | None = None  # of the last step, if the drafter was asked
        self._confidences: list[float] = []  # then, per row
        self._began: float | None = None  # when the last step did
        self._compiled = 0.0  # seconds spent on graphs until then

    def take(self, slots: NewSlots, counted: Tensor | None = None) -> None:
        self._waiting.append(slots)
        self._counted = counted

    def open(self, cache: TreeCache, sampler: Sampler) -> Tensor | None:
        columns = [] if self._counted is None else [self._counted]
        self._opened = None
        if self.planner.is_drafting:
            if self._active is not None:
                for slots in self._waiting:
                    slots.counts = slots.counts * self._active
            slots = _join(self._waiting, self.step.num_depths)
            self._waiting = []
            self._opened = self.step.open(self.state, cache, sampler, slots)
            columns.append(self._opened.chances)
        return torch.cat(columns, dim=1) if columns else None

    def retire(self, active: Tensor) -> None:
        self._active = active
        self._waiting[-1:] = [replace(slots, counts=slots.counts * active) for slots in self._waiting[-1:]]

    @property
    def has_taken_all(self) -> bool:
        return self._opened is not None

    def keep_rows(self, places: Sequence[int], state: Any) -> None:
        self._waiting = [slots.select(places) for slots in self._waiting]
        self._counted = None if self._counted is None else self._counted[places]
        self._confidences = [self._confidences[place] for place in places] if self._confidences else []
        self._active, self.state = None, state
        self._began = None  # copying rows is part of no step

    def draft(
        self, cache: TreeCache, sampler: Sampler, columns: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> tuple[TokenTree, Tensor | None]:
        rows = [row for row, count in enumerate(counts) if count]
        # From one synchronisation to the next. The drafter's first level belongs to the step after it, so only a step
        # followed by one of its kind is measured.
        now = time.perf_counter()
        is_alike = (self._plan is None) == (self._opened is None)
        is_measured = is_alike and self.step.stats.seconds["compile"] == self._compiled
        self._compiled = self.step.stats.seconds["compile"]  # a step that made a graph says nothing
        seconds = now - self._began if self._began is not None and is_measured else None
        if self._plan is not None:
            self._learn(columns, counts, rows, cache.length_bound, seconds)
        elif seconds is not None:
            self.planner.learn_plain(self.costs, cache.length_bound, seconds)
        self._began = now
        # What was learned above belongs to the step before, and to the rows it had.
        self.costs = self._costs_by_size.at(cache.batch_size)
        self.planner.change_costs(self.costs, cache.length_bound)
        if self._opened is None:
            self.planner.pass_step()
            self._plan = None
            return self.step.start_plain(cache, sampler, self._waiting[-1])
        self._confidences = [row[-1] / CHANCE_UNIT for row in columns]
        self._plan = self.planner.choose(self.costs, cache.length_bound, [self._confidences[row] for row in rows])
        if self._plan == NO_TREE:
            return TokenTree.from_root(self._opened.root_ids), self._opened.noise
        return self.step.grow(self.state, sampler, self._opened, self.policy.tree_of(self._plan)), self._opened.noise

    def _learn(
        self,
        columns: Sequence[Sequence[int]],
        counts: Sequence[int],
        rows: Sequence[int],
        context: int,
        seconds: float | None,
    ) -> None:
        assert self._plan is not None
        num_plans = len(self.policy.plans)
        counted: list[Sequence[int]] = [() if self._plan == NO_TREE else columns[row][:num_plans] for row in rows]
        self.planner.learn(
            self._plan,
            [self._confidences[row] for row in rows],
            [counts[row] - 1 for row in rows],
            counted,
            self.costs,
            context,
            seconds,
        )


def _join(waiting: Sequence[NewSlots], width: int) -> NewSlots:
    """All waiting slots of each row side by side, padded to `width` if they are fewer."""
    total = sum(slots.next_ids.shape[1] for slots in waiting)
    if len(waiting) == 1 and total >= width:
        return waiting[0]
    first = waiting[0]
    batch, columns = first.next_ids.shape[0], max(total, width)
    counts = torch.zeros_like(first.counts)
    rows = torch.arange(batch, device=counts.device)[:, None]
    next_ids = first.next_ids.new_zeros(batch, columns)
    features = None if first.features is None else first.features.new_zeros(batch, columns, first.features.shape[-1])
    for slots in waiting:  # what a row's padding leaves behind its real slots, the following slots overwrite
        places = counts[:, None] + torch.arange(slots.next_ids.shape[1], device=counts.device)
        next_ids.index_put_((rows, places), slots.next_ids)
        if features is not None and slots.features is not None:
            features.index_put_((rows, places), slots.features)
        counts = counts + slots.counts
    return NewSlots(features, next_ids, counts)
