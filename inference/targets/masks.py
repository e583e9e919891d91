"""Additive attention masks for a tree's tokens over the cache, with each layer type's sliding window.

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
    """Makes the masks of one model.

    Attributes:
        windows: sliding window in positions, or None for full attention, per layer type.
        dtype: the model's, which its masks must have.
    """

    windows: dict[str, int | None]
    dtype: torch.dtype

    def from_allowed(self, allowed: Tensor, query_positions: Tensor, key_positions: Tensor) -> Any:
        """Additive masks; sliding windows are applied here.

        Args:
            allowed: [B, N, S] bool, which keys each query may see apart from windows.
            query_positions, key_positions: [B, N] and [B, S]. A key is in the window if key > query - window.

        Returns:
            One [B, 1, N, S] tensor of 0 or the dtype's minimum (eager attention would ADD a boolean), or a dict of
            such tensors per layer type for models with several types.
        """
        masks = {
            layer_type: self._make_mask(allowed, query_positions, key_positions, window)
            for layer_type, window in self.windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def in_view(
        self, cache: TreeCache | DraftRows, positions: Tensor, node_positions: Tensor, ancestors: Tensor
    ) -> Any:
        """Masks [B, 1, N, W] over the W slots that each type of layer sees.

        A query sees the committed tokens and its ancestors.

        Args:
            positions: [B, N], of the queries.
            node_positions: [B, M], of the M slots of the tree.
            ancestors: [B, N, M] bool.
        """
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
