"""ScratchCache: keys and values of a causal LM that drafts trees level by level.

Legend: B batch, W new tokens of one pass, R scratch rows of the tree, S slots in view.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.cache.tree_cache import LayerSpec, TreeCache


class ScratchCache(TreeCache):
    """A `TreeCache` that is told by tensors where a pass writes, so that compiled functions may open slots themselves.

    The first `lengths[b]` slots of a row hold its certain tokens (slot = position), the next R the nodes of a tree,
    which stay from level to level until `open_certain` writes over them.

    Worked example, one row with 5 certain tokens, R = 4, at the second level of a tree (2 nodes behind 1):

        open_level([1, 2])       writes slots 6, 7; slots 5 .. 8 are the tree's, slots 0 .. 4 certain

    Args:
        max_tokens: certain tokens a row can hold.
        num_scratch: R.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        batch_size: int,
        *,
        max_tokens: int,
        num_scratch: int,
        device: torch.device | str | None = None,
    ) -> None:
        # One slot more than is ever seen: padding of rows that are full is written there.
        super().__init__(layers, batch_size, max_tokens + num_scratch + 1, device=device, view_multiple=1)
        self.num_scratch = num_scratch
        self.tree_slots = self.slots

    def open_certain(self, width: int, max_tokens: int) -> None:
        """Open the slots behind each row's certain tokens for a pass over `width` tokens, padding included.

        Args:
            max_tokens: the largest number of certain tokens of any row once its real ones are kept (`keep_certain`).
        """
        self._set_view(max_tokens + self.num_scratch + 1, 0)
        self.slots = self._slots_behind(self.first_slots(width))
        self.tree_slots = self.slots

    def open_level(self, rows: Tensor) -> None:
        """Open the scratch rows `rows` [W] long of every row."""
        self.slots = self._slots_behind(rows)
        self.tree_slots = self._slots_behind(self.first_slots(self.num_scratch))

    def _slots_behind(self, steps: Tensor) -> Tensor:
        """[B, W] long, the slots `steps` [W] behind each row's certain tokens; of the last one in view, which is there
        for padding, there may be several. Rows whose text has ended may have taken in tokens behind its end, and so be
        longer than what is in view: nobody reads their scores.
        """
        return (self.lengths[:, None] + steps).clamp(max=self.view - 1)

    def _note_use(self, num_slots: int) -> None:
        """Nothing: compiled functions open slots and must not change a number of the host. `reset` clears all."""

    def reset(self, num_rows: int | None = None) -> None:
        self._num_used = self.capacity
        super().reset(num_rows)
        self.lengths = torch.zeros_like(self.lengths)  # `keep_certain` makes new ones, which may be of inference mode

    def copy_rows(self, source: TreeCache, rows: Tensor, lengths: Tensor, *, max_length: int) -> None:
        super().copy_rows(source, rows, lengths, max_length=max_length)
        self.length_bound = 0  # passes are told what is in view, and compiled ones must not see this change

    def keep_certain(self, counts: Tensor) -> None:
        """The first counts[b] of the tokens of the last `open_certain` pass are certain."""
        self.lengths = self.lengths + counts

    def slots_seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """As in `TreeCache`, but the places of all slots of the tree; layers with a window have the whole view."""
        return self.slots_in_view, self.tree_slots
