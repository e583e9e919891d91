"""TreeRowsCache: keys and values of a causal LM that drafts trees level by level.

Legend: B batch, W new tokens of one pass, R tree rows, S slots in view.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.inference.cache.kv_cache import KVCache, LayerSpec


class TreeRowsCache(KVCache):
    """A `KVCache` in which tensors say where a pass writes, so that compiled functions can open slots.

    The first `lengths[b]` slots of a row hold its committed tokens (slot = position). The next R slots hold the nodes
    of a tree from level to level, until `open_committed` overwrites them.

    Worked example, one row with 5 committed tokens, R = 4, at the second level of a tree (2 nodes after 1):

        open_level([1, 2])       writes slots 6, 7; slots 5 .. 8 are the tree's, slots 0 .. 4 hold committed tokens

    Args:
        max_tokens: the most committed tokens of a row.
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
        # One slot more than is ever seen: padding of full rows is written there.
        super().__init__(layers, batch_size, max_tokens + num_scratch + 1, device=device, view_multiple=1)
        self.num_scratch = num_scratch
        self.tree_slots = self.slots

    def open_committed(self, width: int, max_tokens: int) -> None:
        """Opens the slots after each row's committed tokens for a pass over `width` tokens, padding included.

        Args:
            max_tokens: the largest number of committed tokens of any row after `keep_committed`.
        """
        self._set_view(max_tokens + self.num_scratch + 1, 0)
        self.slots = self._slots_after(self.first_slots(width))
        self.tree_slots = self.slots

    def open_level(self, rows: Tensor) -> None:
        """Opens the tree's nodes `rows` [W] long of every row."""
        self.slots = self._slots_after(rows)
        self.tree_slots = self._slots_after(self.first_slots(self.num_scratch))

    def _slots_after(self, steps: Tensor) -> Tensor:
        """[B, W] long, the slots `steps` [W] after each row's committed tokens.

        The last slot in view is for padding and may come several times. A row whose text has ended may be longer than
        the view; nobody reads its scores.
        """
        return (self.lengths[:, None] + steps).clamp(max=self.view - 1)

    def _note_use(self, num_slots: int) -> None:
        """Does nothing: compiled functions open slots, and must not change host numbers."""

    def clear_from(self, num_slots: int) -> None:
        self._num_used = self.capacity  # nothing has counted them
        super().clear_from(num_slots)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._num_used = self.view
        super().keep_rows(rows)

    def keep_committed(self, counts: Tensor) -> None:
        """Keeps the first counts[b] tokens of the last `open_committed` pass."""
        self.lengths += counts
        self.slots = self.tree_slots = self.lengths[:, None]  # a prompt's length would make graphs of its own

    def slots_seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """As in `KVCache`, with the places of all slots of the tree. Layers with a window see the whole view."""
        return self.slots_in_view, self.tree_slots
