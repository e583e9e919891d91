"""RowState: rows of a drafter's state are forgotten, copied, dropped and added field by field, in place.

Legend: B batch, S slots, R tree rows, W frontier nodes of one tree level.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from draftsmith.inference.cache.row_selection import first_rows


class RowState:
    """What a drafter keeps of each row. A subclass names its fields.

    Attributes:
        row_fields: names of fields with rows: a tensor [B, ...], another `RowState`, a list of states, or None.
        slot_fields: names of tensors [B, S + 1, ...] or None with an entry for each accepted slot, and a last one for
            padding. `copy_rows` copies them. The tensors in `row_fields` belong to the draft, which it does not copy.
        begins_with: what tensors are filled with before anything was read, where it is not 0.
    """

    row_fields: ClassVar[tuple[str, ...]] = ()
    slot_fields: ClassVar[tuple[str, ...]] = ()
    begins_with: ClassVar[dict[str, float]] = {}

    _all_rows: Mapping[str, Tensor] = MappingProxyType({})  # the tensors with the rows behind those in use

    def reset(self, num_rows: int) -> None:
        """Forgets everything; from now on the state is that of the first `num_rows` of its rows."""
        if not self._all_rows:
            names = (*self.row_fields, *self.slot_fields)
            self._all_rows = {name: one for name in names if isinstance(one := getattr(self, name), Tensor)}
        for name, tensor in self._all_rows.items():
            tensor.fill_(self.begins_with.get(name, 0))
        for name in self.row_fields:
            for state in _states_in(getattr(self, name)):
                state.reset(num_rows)
        self.show_rows(num_rows)

    def copy_rows(self, source: Any, rows: Tensor, lengths: Tensor, max_slots: int) -> None:
        """Fills this state, which may be the source: `Drafter.copy_rows`."""
        for name in self.row_fields:
            for own, other in zip(_states_in(getattr(self, name)), _states_in(getattr(source, name)), strict=True):
                own.copy_rows(other, rows, lengths, max_slots)
        found = {
            name: one[:, :max_slots].index_select(0, rows.to(one.device))
            for name in self.slot_fields
            if (one := getattr(source, name)) is not None
        }
        self.show_rows(len(rows))
        for name, values in found.items():
            width = min(values.shape[1], getattr(self, name).shape[1] - 1)
            getattr(self, name)[:, :width] = values[:, :width]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Row i becomes the present row rows[i] >= i, in place; the others are forgotten."""
        for name in (*self.row_fields, *self.slot_fields):
            value = getattr(self, name)
            for state in _states_in(value):
                state.keep_rows(rows)
            if isinstance(value, Tensor):
                setattr(self, name, first_rows(value, rows))

    def add_rows(self, other: Any, max_slots: int) -> None:
        """The rows of `other`, of the same sizes, come after the present ones. The states share nothing then."""
        for name in (*self.row_fields, *self.slot_fields):
            value, added = getattr(self, name), getattr(other, name)
            for state, one in zip(_states_in(value), _states_in(added), strict=True):
                state.add_rows(one, max_slots)
            if isinstance(value, Tensor):
                tensor, last = self._all_rows.get(name, value), len(value) + len(added)
                if last <= len(tensor):
                    tensor[len(value) : last] = added
                else:
                    tensor = torch.cat([value, added])
                    self._all_rows = {**self._all_rows, name: tensor} if self._all_rows else self._all_rows
                setattr(self, name, tensor[:last])

    def show_rows(self, num_rows: int) -> None:
        """From now on a state that was `reset` is that of the first `num_rows` rows, whatever these hold."""
        for name in self.row_fields:
            for state in _states_in(getattr(self, name)):
                state.show_rows(num_rows)
        for name, tensor in self._all_rows.items():
            setattr(self, name, tensor[:num_rows])


def _states_in(value: Any) -> list[RowState]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, RowState)]


class Level(NamedTuple):
    """One level of a draft.

    Attributes:
        above: [B, W] int64, the parents' places among the root (0) and the tree rows (from 1).
        own: [W] int64, the level's tree rows; places: [W], where they are behind the root.
        itself: [W, R] bool, the tree row of each node.
        ancestors: [B, W, R] bool, the tree rows that each node sees: those of its ancestors and its own.
        depth: [1] int64, how many levels are above this one, the root's not counted.
    """

    above: Tensor
    own: Tensor
    places: Tensor
    itself: Tensor
    ancestors: Tensor
    depth: Tensor

    def parents_of(self, values: Tensor) -> Tensor:
        """`values` [B, 1 + R, ...] at the parents: [B, W, ...]."""
        places = self.above.view(*self.above.shape, *[1] * (values.dim() - 2))
        return values.gather(1, places.expand(-1, -1, *values.shape[2:]))


class TreeRows(RowState):
    """The tree rows of a draft that grows level by level. Counts are tensors of fixed shape, so that every
    level is the same function.

    Worked example, R = 4, the root and two levels:

        open_level([[0, 0]])     own 0, 1   ancestors 0: 1 0 0 0    1: 0 1 0 0
        open_level([[1]])        own 2      ancestors 2: 0 1 1 0

    Attributes:
        ancestors: [B, 1 + R, R] bool, which tree rows the root (row 0) and each tree row see.
        depths: [R] int64, the level of each used tree row, from 0.
        base: [1] int64, where the last frontier begins in `ancestors`.
        used, depth: [1] int64, tree rows and levels so far.
    """

    row_fields = ("ancestors",)

    def __init__(self, batch_size: int, num_rows: int, device: torch.device) -> None:
        self.ancestors = torch.zeros(batch_size, 1 + num_rows, num_rows, dtype=torch.bool, device=device)
        self.depths = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.base, self.used, self.depth = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(3))

    def forget_levels(self) -> None:
        """Begins a new draft."""
        self.base, self.used, self.depth = self.base.new_zeros(1), self.base.new_zeros(1), self.base.new_zeros(1)

    def open_level(self, parents: Tensor) -> Level:
        """Opens the next tree rows as the next deeper level; parents [B, W] int64 are places in the last level."""
        width, num_rows = parents.shape[1], self.depths.shape[0]
        above = self.base + parents
        own = self.used + torch.arange(width, device=above.device)
        itself = own[:, None] == torch.arange(num_rows, device=above.device)
        ancestors = self.ancestors.gather(1, above[..., None].expand(-1, -1, num_rows)) | itself
        level = Level(above, own, 1 + own, itself, ancestors, self.depth)
        self.ancestors.index_copy_(1, level.places, ancestors)
        self.depths.index_copy_(0, own, self.depth.expand(width))
        self.base, self.used, self.depth = 1 + self.used, self.used + width, self.depth + 1
        return level
