"""KVCache: the target's keys and values, allocated once, with its own length for every row.

Legend: B batch, N tree nodes (or prompt tokens of one chunk), P path length, C capacity in slots, H key-value heads,
S slots in view, W slots of them that a layer with a sliding window sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from draftsmith.inference.cache.recurrent_states import RecurrentStates
from draftsmith.inference.cache.row_selection import first_rows, pick_rows
from draftsmith.inference.cache.source import SourceMemory

VIEW_MULTIPLE = 64  # the view grows in steps of this many slots


@dataclass(frozen=True)
class KVSpec:
    """The keys or the values of one layer (their widths differ in MLA layers)."""

    num_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class LayerSpec:
    """The keys and values that one attention layer writes into the cache, and its window.

    Attributes:
        window: a query at position p sees only keys at positions > p - window; None = all keys before it.
    """

    keys: KVSpec
    values: KVSpec
    window: int | None = None


class Span(NamedTuple):
    """How many tokens the rows of a pass hold, of those rows whose result matters. The host knows it; a cache does not.

    Attributes:
        shortest: the fewest, or less. It sets which slots the layers with a window see: too many lose keys.
        longest: the most, or more. It sets how many slots the attention sees: too few lose keys.
    """

    shortest: int
    longest: int


EMPTY = Span(0, 0)


class KVCache(Cache):
    """A preallocated cache in which slot = position for every committed token of every row.

    A step calls `open_slots(N, span)`, runs the model (each layer's `update` writes N rows after the row's own length),
    and calls `commit(path, counts)`. The next step overwrites nodes that were not committed.

    Worked example, one row with 5 committed tokens and a tree of 4 nodes (node 0 the root, 1 and 2 its children,
    3 the child of 2):

        open_slots(4, Span(5, 5))         nodes 0..3 go to slots 5, 6, 7, 8
        commit([[0, 2, 3]], [3])          slots 7, 8 are copied to 6, 7; the row's length becomes 8

    Attributes:
        lengths: [B] long on the target's device, committed tokens per row. The cache never reads them on the host.
        span: of the present pass.
        slots: [B, N] long, the slots opened for the present pass.
        slots_in_view: [S] long, 0 .. S - 1, the slots that the attention of the present pass sees. It is a tensor so
            that a compiled graph reads S from its shape and serves every S.
        window_sizes: for each distinct window a [W] long, of which only the shape matters: layers with this window see
            the last W of the S slots in view.
        source: the source of an encoder-decoder target (`Target.read_source`); None for other targets.
        offsets: [B, 1] or [A, B, 1] long, by how much the positions of tokens after the prompts exceed their slots, on
            each axis of the positions; None if positions are slots (`read_media`).
        states: of the recurrent layers; None for targets without any.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec | None],
        batch_size: int,
        capacity: int,
        *,
        device: torch.device | str | None = None,
        view_multiple: int = VIEW_MULTIPLE,
        states: RecurrentStates | None = None,
    ) -> None:
        """Allocates zeroed buffers (a NaN in a masked slot would poison attention: 0 * NaN).

        Args:
            layers: None for layers without attention.
            capacity: slots per row, for the longest sequence and the largest tree.
            device: of `lengths`; default the first layer's device.
            view_multiple: the view grows in steps of this many slots, so that few shapes occur.
        """
        super().__init__(layers=[])
        self.layer_specs = tuple(layers)
        self.capacity = capacity
        self.view_multiple = view_multiple
        self._num_used = 0  # slots that may hold something
        self.source: SourceMemory | None = None
        self.offsets: Tensor | None = None
        self.states = states
        specs = [spec for spec in self.layer_specs if spec is not None]
        # Where the keys and values of each layer with attention are among all planes.
        self._numbers = {layer: number for number, layer in enumerate(i for i, s in enumerate(layers) if s is not None)}
        groups: Counter[KVSpec] = Counter()  # planes of one shape, dtype and device share a stacked buffer
        self._places: list[tuple[KVSpec, int]] = []
        for plane in (plane for spec in specs for plane in (spec.keys, spec.values)):
            self._places.append((plane, groups[plane]))
            groups[plane] += 1
        with torch.inference_mode(False):  # inference tensors could not be written outside inference mode
            self._all_buffers = {  # each [planes, B, H, C, width]
                plane: torch.zeros(
                    (count, batch_size, plane.num_heads, capacity, plane.width), dtype=plane.dtype, device=plane.device
                )
                for plane, count in groups.items()
            }
            self._all_lengths = torch.zeros(batch_size, dtype=torch.long, device=device or specs[0].keys.device)
            self._every_slot = torch.arange(capacity, device=self._all_lengths.device)
        self._windows = tuple(None if spec is None else spec.window for spec in self.layer_specs)
        self._show_rows(batch_size)
        self.slots, self.span = self.lengths[:, None], EMPTY
        self._packed: tuple[Tensor, Tensor] | None = None  # [1, T], of each packed token its slot and row
        self._set_view(0, 0)

    def _show_rows(self, num_rows: int) -> None:
        """From now on all methods work on the first `num_rows` rows."""
        shown = {plane: buffer[:, :num_rows] for plane, buffer in self._all_buffers.items()}
        planes = [shown[plane][number] for plane, number in self._places]  # each [B, H, C, width]
        self._buffers, self._keys, self._values = list(shown.values()), planes[0::2], planes[1::2]
        self.lengths = self._all_lengths[:num_rows]

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    @property
    def max_batch_size(self) -> int:
        """The number of rows that were allocated."""
        return self._all_lengths.shape[0]

    @property
    def view(self) -> int:
        """The number of slots that the attention of the present pass sees."""
        return self.slots_in_view.shape[0]

    def view_slots(self, num_slots: int) -> Tensor:
        """[S] long, 0 .. S - 1, where S is `num_slots` rounded up to a size of the view, within the capacity."""
        return self.first_slots(-(-num_slots // self.view_multiple) * self.view_multiple)

    def first_slots(self, num_slots: int) -> Tensor:
        """[S] long, 0 .. S - 1, within the capacity."""
        return self._every_slot[:num_slots]

    def _set_view(self, num_slots: int, shortest: int) -> None:
        """Each window's view starts at a multiple of `view_multiple`, at or before the first slot it may need.

        Worked example, a window of 8 with views in steps of 4: a query after 21 tokens sees positions 14 to 21, so
        the view is slots 12 .. S - 1.
        """
        self.slots_in_view = self.view_slots(num_slots)
        size = self.slots_in_view.shape[0]
        self._note_use(size)
        self.window_sizes: dict[int, Tensor] = {}
        for window in self._windows:
            if window is not None and window not in self.window_sizes:
                start = max(0, shortest - window + 1) // self.view_multiple * self.view_multiple
                # The slice begins at slot 0, because compiled graphs guard a tensor's storage offset.
                self.window_sizes[window] = self._every_slot[: size - start]

    def _note_use(self, num_slots: int) -> None:
        self._num_used = max(self._num_used, num_slots)

    def to_positions(self, slots: Tensor) -> Tensor:
        """The positions [B, N] or [A, B, N] of tokens after the prompts, from their slots [B, N]."""
        return slots if self.offsets is None else slots + self.offsets

    def open_slots(self, num_nodes: int, span: Span) -> None:
        """Opens the next `num_nodes` slots after every row's length for the coming forward pass."""
        needed = span.longest + num_nodes
        if needed > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} slots per row, but {num_nodes} new tokens after up to "
                f"{span.longest} committed ones need {needed}: create it with a larger capacity"
            )
        assert span.shortest <= span.longest
        self._set_view(needed, span.shortest)
        self.span = span
        # Shorter rows write where every window reaches: a query without keys could become NaN.
        has_start = self.window_sizes and span.shortest
        first = self.lengths.clamp(min=span.shortest) if has_start else self.lengths
        self.slots = first[:, None] + torch.arange(num_nodes, device=self.lengths.device)
        self._packed = None

    def pack(self, places: Tensor) -> None:
        """The pass reads only the open slots at `places` [T] among B x N, as one row of tokens."""
        rows = torch.div(places, self.slots.shape[1], rounding_mode="floor")
        self._packed = self.slots.flatten()[places][None], rows[None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's layers: writes [B, H, N, width] rows into the open slots, returns the layer's view."""
        slots, rows = self._packed or (self.slots, None)
        keys, values = self.write(layer_idx, slots, key_states, value_states, rows)
        window, size = self._windows[layer_idx], self.slots_in_view.shape[0]
        # From shapes only, because compiled graphs contain it.
        start = 0 if window is None else size - self.window_sizes[window].shape[0]
        return keys[:, :, start:size], values[:, :, start:size]

    def write(
        self, layer_idx: int, slots: Tensor, key_states: Tensor, value_states: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Writes states [B, H, N, width] into `slots` [B, N] of one layer; returns all its keys and values.

        Args:
            rows: [B, N], the row of each slot; None = each row's own.
        """
        number = self._numbers[layer_idx]
        planes = self._keys[number], self._values[number]
        for plane, states in zip(planes, (key_states, value_states), strict=True):
            here = slots.to(plane.device)
            if plane.shape[0] == 1:
                plane.index_copy_(2, here[0], states)
            else:  # on a CPU, torch's scatter_ takes twice as long, in 16 bits up to a hundred times
                own = _every_row(here) if rows is None else rows.to(plane.device)
                plane.transpose(1, 2).index_put_((own, here), states.transpose(1, 2))
        return planes

    def slots_seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """The slots [W] that layers with this window see, and the places [B, N] of the open slots among them, long."""
        if window is None:
            return self.slots_in_view, self.slots
        start = self._view_start(window)
        return self.slots_in_view[start:], self.slots - start

    def _view_start(self, window: int | None) -> int:
        """The first slot in view. It comes from shapes only, because compiled graphs contain it."""
        return 0 if window is None else self.view - self.window_sizes[window].shape[0]

    def commit(self, path: Tensor, counts: Tensor, *, is_chain: bool = False) -> None:
        """Keeps the accepted nodes of the last pass and forgets the others.

        Args:
            path: [B, P] long, node indices, root first (`path[:, 0]` is 0); entries from `counts[b]` on are padding.
            counts: [B] long, number of nodes that are kept, root included; 0 leaves a row unchanged.
            is_chain: the path is 0, 1, 2, ... in every row, so that nothing has to move.
        """
        assert path.shape[1] <= self.slots.shape[1], "a path cannot be longer than the tree"
        if self.states is not None:
            self.states.accept(path, counts)
        if not is_chain and path.shape[1] > 1:
            start = self.lengths[:, None]
            source = start + path[:, 1:]  # [B, P-1]; the root never moves
            destination = start + torch.arange(1, path.shape[1], device=path.device)
            for buffer in self._buffers:
                _move_slots(buffer, source.to(buffer.device), destination.to(buffer.device))
        self.lengths += counts

    def advance(self, counts: Tensor) -> None:
        """Commits the first `counts[b]` open slots of every row, in place."""
        if self.states is not None:
            self.states.accept(self.first_slots(self.slots.shape[1]).expand(self.batch_size, -1), counts)
        self.lengths += counts
        self.slots = self.lengths[:, None]  # a prompt's length would make graphs of its own

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps these rows: row i becomes the present row rows[i] >= i. The others are forgotten until `reset`.

        Worked example, rows 1 and 2 of 4 have ended: keep_rows([0, 3]) copies row 3 to row 1.
        """
        for buffer in self._buffers:
            first_rows(buffer[:, :, :, : self._num_used].transpose(0, 1), rows)
        first_rows(self.lengths, rows)
        self._show_rows(len(rows))
        if self.states is not None:
            self.states.keep_rows(rows)
        if self.source is not None:
            self.source.select_rows(pick_rows(self._every_slot, rows))
        if self.offsets is not None:
            self.offsets = self.offsets.index_select(-2, pick_rows(self._every_slot, rows))

    def add_rows(self, source: KVCache, *, max_length: int) -> None:
        """Adds the rows of another cache of the same layers and capacity after the present ones.

        Worked example, rows of 5 and 3 tokens here and one of 7 in `source`: the rows have 5, 3 and 7 tokens.

        Args:
            max_length: no row of `source` has more tokens.
        """
        assert source.source is None, "the rows of sources are read anew"
        assert source.offsets is None, "rows with media are not added"
        assert source.capacity == self.capacity, "rows would not fit"
        first, last = self.batch_size, self.batch_size + source.batch_size
        if last > self.max_batch_size:
            self._allocate_rows(last)
        self._show_rows(last)
        for plane, other in zip((*self._keys, *self._values), (*source._keys, *source._values), strict=True):
            plane[first:, :, :max_length] = other[:, :, :max_length]
            plane[first:, :, max_length : self._num_used].zero_()  # what rows that have left wrote there
        self._note_use(max_length)
        self.lengths[first:] = source.lengths

    def _allocate_rows(self, num_rows: int) -> None:
        """Makes room for more rows, and copies those that are shown."""
        shown = self.batch_size
        with torch.inference_mode(False):
            for plane, old in self._all_buffers.items():
                buffer = torch.zeros((old.shape[0], num_rows, *old.shape[2:]), dtype=old.dtype, device=old.device)
                buffer[:, :shown] = old[:, :shown]
                self._all_buffers[plane] = buffer
            lengths = torch.zeros(num_rows, dtype=torch.long, device=self.lengths.device)
            lengths[:shown] = self.lengths
            self._all_lengths = lengths

    def clear_from(self, num_slots: int) -> None:
        """Zeroes all slots from `num_slots` on that were used."""
        for buffer in self._all_buffers.values():
            buffer[:, :, :, num_slots : self._num_used].zero_()
        self._num_used = min(self._num_used, num_slots)

    def reset(self, num_rows: int | None = None) -> None:
        """Forgets every token and zeroes all slots that were used: a NaN in a masked slot would spoil the next text.

        Args:
            num_rows: the number of rows to work on; None = all.
        """
        self.clear_from(0)
        self._show_rows(self._all_lengths.shape[0] if num_rows is None else num_rows)
        self._all_lengths.zero_()
        if self.states is not None:
            self.states.reset(self.batch_size)
        self.source = self.offsets = None
        self.span = EMPTY
        self._set_view(0, 0)

    def held_length(self, row: int, most: int) -> int:
        """The largest number of a row's first tokens, at most `most`, that `copy_rows` can keep."""
        return most if self.states is None else self.states.held_length(row, most)

    def copy_rows(self, source: KVCache, rows: Tensor, lengths: Tensor, *, max_length: int) -> None:
        """Replaces this cache's rows with rows of a cache of the same layers: itself, or another one of any size.

        Worked example, rows of 5, 3 and 7 tokens in `source`, two rows here:

            copy_rows(source, [2, 0], [7, 4], max_length=7)     row 2, and the first 4 tokens of row 0

        Args:
            rows: [B] long, the row of `source` that becomes each row; it may come several times.
            lengths: [B] long, the number of its first tokens that are kept; `source` has them (`held_length`), and they
                fit here.
            max_length: no entry of `lengths` is larger.
        """
        assert source.source is None, "the rows of sources are read anew"
        width = min(max_length, self.capacity, source.capacity)
        others = (*source._keys, *source._values)
        self._note_use(width)
        self._show_rows(len(rows))
        # Rows that are in place already stay.
        moved = [place for place, row in enumerate(rows.tolist()) if source is not self or place != row]
        places = torch.tensor(moved, dtype=torch.long, device=rows.device)
        if moved:
            for plane, other in zip((*self._keys, *self._values), others, strict=True):
                # Plane by plane, so that the gathered copy is only as large as one plane.
                gathered = other[:, :, :width].index_select(0, rows[places].to(other.device))
                plane[:, :, :width].index_copy_(0, places.to(plane.device), gathered)
        self.clear_from(width)
        if self.states is not None:
            assert source.states is not None, "a cache of the same layers"
            self.states.copy_rows(source.states, rows.tolist(), lengths.tolist())
        self.lengths.copy_(lengths)
        self.source = self.offsets = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.span.longest

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        start = self._view_start(self._windows[layer_idx])
        return self.view - start, start

    def __len__(self) -> int:
        return len(self.layer_specs)


def _move_slots(buffer: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copies slots `source` [B, P] to slots `destination` [B, P] in every plane of `buffer` [planes, B, H, C, width].

    All slots are gathered before one is written, so the ranges may overlap.
    """
    if buffer.shape[1] == 1:
        buffer.index_copy_(3, destination[0], buffer.index_select(3, source[0]))
        return
    by_slot = buffer.permute(1, 3, 0, 2, 4)  # [B, C, planes, H, width]
    by_slot.index_put_((_every_row(destination), destination), by_slot[_every_row(source), source])


def _every_row(slots: Tensor) -> Tensor:
    """[B, 1] long, each row's number, to index together with slots [B, P]."""
    return torch.arange(slots.shape[0], device=slots.device)[:, None]
