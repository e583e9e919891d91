"""RecurrentStates: what recurrent layers remember of each row's committed tokens.

Keys and values of a rejected draft stay behind in their slots. A recurrent state sums up all tokens that were read, and
cannot be cut back. So a verify pass starts from the states at the last committed token, and does not change them. It
records what each recurrent layer read. Once the accepted path is known, each layer reads that path alone, from its
record, and the new states are those after exactly the accepted tokens.

Legend: B batch, N tokens of a pass, P nodes of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache.row_selection import first_rows

StateName = tuple[str, int]  # ("conv" or "recurrent", number within the layer)
States = dict[StateName, Tensor]  # of one layer: each [rows, ...]
Replay = Callable[[Tensor, Tensor, States], States]


@dataclass(frozen=True)
class StateSpec:
    """One state of a layer, for one row."""

    name: StateName
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class RecurrentStates:
    """The states of a `KVCache`'s rows, allocated once.

    Worked example, one row with 5 tokens, and a tree whose nodes 0 and 2 are accepted:

        the pass reads nodes 0 .. 3       the states stay those after 5 tokens; the layers record their inputs
        accept([[0, 2]], [2])             notes the path
        apply_accepted()                  the layers read nodes 0 and 2: states after 7 tokens

    Args:
        specs: per recurrent layer, its states.

    Attributes:
        lengths: tokens that each row's states sum up; host numbers.
        plan: how the coming pass reads its tokens; the recurrent layers look here.
    """

    def __init__(self, specs: Mapping[int, Sequence[StateSpec]], batch_size: int) -> None:
        with torch.inference_mode(False):
            self._all = {
                layer: {
                    spec.name: torch.zeros((batch_size, *spec.shape), dtype=spec.dtype, device=spec.device)
                    for spec in states
                }
                for layer, states in specs.items()
            }
        self.plan: Any = None
        self._records: dict[int, tuple[Replay, Sequence[States]]] = {}
        self._accepted: tuple[Tensor, Tensor] | None = None  # path, counts
        self.lengths = [0] * batch_size

    def take(self, layer: int, rows: Tensor) -> States:
        """Copies of these rows' states."""
        return {name: values.index_select(0, rows.to(values.device)) for name, values in self._all[layer].items()}

    def put(self, layer: int, rows: Tensor, states: States) -> None:
        for name, values in self._all[layer].items():
            values.index_copy_(0, rows.to(values.device), states[name].to(values.dtype))

    def plan_pass(self, plan: Any) -> None:
        """Begins a pass, after `apply_accepted`. What an earlier pass has recorded is forgotten."""
        self.apply_accepted()
        self.plan, self._records = plan, {}

    def note_read(self, counts: Sequence[int]) -> None:
        """Counts tokens of prompts, which the layers have put into the states."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def record(self, layer: int, replay: Replay, after: Sequence[States]) -> None:
        """Called by a layer that has read drafts.

        Args:
            replay: `replay(rows, nodes, states)` reads the nodes [G, P] of rows [G] once more, after `states`; returns
                the states after them.
            after: of a chain, the states after each of its first nodes, as far as they are known.
        """
        self._records[layer] = replay, after

    def accept(self, path: Tensor, counts: Tensor) -> None:
        """Notes what `KVCache.commit` keeps of a pass over drafts. Tokens of prompts are in the states already."""
        if self._records:
            self._accepted = path, counts

    def apply_accepted(self) -> None:
        """Brings the states to the last accepted token. The host reads the counts, which are known by now."""
        if self._accepted is None:
            return
        (path, counts), self._accepted = self._accepted, None
        numbers: list[int] = counts.tolist()
        for count in sorted(set(numbers) - {0}):
            rows = [row for row, number in enumerate(numbers) if number == count]
            index = torch.tensor(rows, device=path.device)
            for layer, (replay, after) in self._records.items():
                if count <= len(after):
                    states = {name: values[index.to(values.device)] for name, values in after[count - 1].items()}
                else:
                    states = replay(index, path[index, :count], self.take(layer, index))
                self.put(layer, index, states)
            for row in rows:
                self.lengths[row] += count
        self._records = {}

    def held_length(self, row: int, most: int) -> int:
        """The largest number of a row's first tokens, at most `most`, whose states are here: 0, those before the last
        step, or all."""
        before = self.lengths[row]
        after = before + (0 if self._accepted is None else int(self._accepted[1][row]))
        return max(length for length in (0, before, after) if length <= max(most, 0))

    def keep_rows(self, rows: Sequence[int]) -> None:
        """As `KVCache.keep_rows`."""
        self.apply_accepted()
        for states in self._all.values():
            for values in states.values():
                first_rows(values, rows)
        self.lengths = [self.lengths[row] for row in rows]

    def copy_rows(self, source: RecurrentStates, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """As `KVCache.copy_rows`, for lengths that `source.held_length` has allowed."""
        index = torch.tensor(rows)
        is_before = [source.lengths[row] == length for row, length in zip(rows, lengths, strict=True)]
        taken = {layer: source.take(layer, index) for layer in self._all}
        source.apply_accepted()
        for layer, before in taken.items():
            after = source.take(layer, index)
            for name, values in before.items():
                for place, length in enumerate(lengths):
                    if length == 0:
                        values[place] = 0
                    elif not is_before[place]:
                        assert source.lengths[rows[place]] == length, "states of this length are not held"
                        values[place] = after[name][place]
            self.put(layer, torch.arange(len(rows)), before)
        self.lengths = list(lengths)
        self._records, self._accepted = {}, None

    def reset(self, num_rows: int) -> None:
        for states in self._all.values():
            for values in states.values():
                values.zero_()
        self._records, self._accepted = {}, None
        self.lengths = [0] * num_rows
