"""Additive attention masks of a tree's tokens over the cache, with each layer type's sliding window.

Legend: B batch, N tokens of one pass, M slots of the tree, S cache slots, W of them that a layer sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference.cache.draft_rows import DraftRows
from inference.cache.tree_cache import TreeCache


@dataclass(frozen=True)
class TreeMasks:
    """Args:
    windows: sliding window in positions, or None for full attention, per layer type.
    dtype: of the masks, the model's.
    """

    windows: dict[str, int | None]
    dtype: torch.dtype

    def from_allowed(self, allowed: Tensor, query_positions: Tensor, key_positions: Tensor) -> Any:
        """Additive masks from who may see whom: [B, N, S] bool, positions [B, N] and [B, S].

        Sliding windows are added here, measured in positions: a key is seen if key > query - window.

        Returns:
            One [B, 1, N, S] tensor in the dtype (0 or its minimum; eager attention would ADD a boolean), or
            a dict of them per layer type for models with several.
        """
        masks = {
            layer_type: self._make_mask(allowed, query_positions, key_positions, window)
            for layer_type, window in self.windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def in_view(
        self, cache: TreeCache | DraftRows, positions: Tensor, node_positions: Tensor, ancestors: Tensor
    ) -> Any:
        """`from_allowed` for queries at [B, N] positions, each [B, 1, N, W] over what its layers see: committed
        tokens, and their ancestors [B, N, M] among the M slots of the tree, whose positions are [B, M]."""
        batch, num_queries = positions.shape
        masks = {}
        for layer_type, window in self.windows.items():
            slots_seen, places = cache.slots_seen(window)
            key_positions = slots_seen.expand(batch, -1)
            committed = key_positions < cache.lengths[:, None]
            allowed = committed[:, None, :].repeat(1, num_queries, 1)
            allowed.scatter_(2, places[:, None, :].expand(-1, num_queries, -1), ancestors)
            key_positions = key_positions.scatter(1, places, node_positions)
            masks[layer_type] = self._make_mask(allowed, positions, key_positions, window)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _make_mask(self, allowed: Tensor, query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
        seen = allowed
        if window is not None:
            seen = allowed & (key_positions[:, None, :] > query_positions[:, :, None] - window)
        shut = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype, device=seen.device)
        return torch.where(seen, torch.zeros_like(shut), shut)[:, None]
