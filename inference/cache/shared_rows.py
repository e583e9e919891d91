"""SharedRows: the target's cache for a drafter that runs the target's own first layers on drafted tokens.

Legend: B batch, W tokens of one level, R rows of a draft (the root and all frontier nodes), S slots in view, H
key-value heads.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from draftsmith.inference.cache.kv_cache import KVCache


class SharedRows(Cache):
    """The slots of a `KVCache` after each row's committed tokens, lent until the next verification overwrites them.

    The draft shares the target's cache (Kangaroo, arXiv 2404.18911, section 3.2). The drafter reads the first layers'
    keys and values of committed tokens there. It writes keys and values of drafted tokens after them; these are never
    committed.
    Row r is in slot length + r. The drafter says which rows a level has (`TreeRows`).

    Worked example, 5 committed tokens: the root is row 0, in slot 5; its two children, rows 1 and 2, are in slots 6 and
    7.

    Attributes:
        max_slots: no row has more committed tokens than this.
        slots: [B, W] long, the slots of the open level.
        depth: [1] long, the depth of the open level.
        depths: [R] long, the depth of each used row.
    """

    def __init__(self, cache: KVCache, num_rows: int) -> None:
        super().__init__(layers=[])
        self.cache = cache
        self.num_rows = num_rows
        self.max_slots = 0
        self.rows = torch.arange(num_rows, device=cache.lengths.device)
        self.open_level(self.rows[:1], self.rows[:1], self.rows)

    @property
    def lengths(self) -> Tensor:
        """[B] long, committed tokens per row."""
        return self.cache.lengths

    def to_positions(self, slots: Tensor) -> Tensor:
        """As `KVCache.to_positions`."""
        return self.cache.to_positions(slots)

    def open_level(self, own: Tensor, depth: Tensor, depths: Tensor) -> None:
        """Opens the rows `own` [W] long as a level; `depth` and `depths` as in the attributes."""
        self.slots, self.depth, self.depths = self.lengths[:, None] + own, depth, depths

    def slots_seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """The slots [S] in view, and the slots [B, R] of the draft's rows, all long. The masks apply the windows.

        A row with more than `max_slots` tokens, its root included, lies partly outside the view. Nobody reads its draft
        (`Drafter.share_cache`)."""
        slots = self.cache.first_slots(self._view)
        return slots, (self.lengths[:, None] + self.rows).clamp(max=slots.shape[0] - 1)

    @property
    def _view(self) -> int:
        return self.max_slots + self.num_rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's layers: writes [B, H, W, width] into the open level, returns the S slots in view."""
        keys, values = self.cache.write(layer_idx, self.slots, key_states, value_states)
        return keys[:, :, : self._view], values[:, :, : self._view]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.max_slots

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return min(self._view, self.cache.capacity), 0

    def __len__(self) -> int:
        return len(self.cache)
