"""AutoTree: dynamic trees whose depth and number of nodes are chosen at every step (`tree="auto"`).

Legend: B batch, N tree nodes, P path length (root included), D number of depths to choose from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inference.drafter import Drafter, DraftLogits, DraftSampling
from inference.policy import DynamicTree, TreePolicy
from inference.tree import TokenTree


class AutoTree(TreePolicy):
    """Trees of EAGLE-2's kind (`DynamicTree`) in several sizes; `TreePlanner` says which one pays.

    Args:
        depths, sizes: depths and numbers of nodes (root included) to choose from. Compiled, each pair that is chosen is
            a graph of its own.
        top_k: as in `DynamicTree`.
    """

    def __init__(
        self, depths: Sequence[int] = (1, 2, 3, 4, 6), sizes: Sequence[int] = (8, 16, 32), top_k: int = 8
    ) -> None:
        if not depths or not sizes or min(depths) < 1 or min(sizes) < 2 or top_k < 1:
            raise ValueError(
                f"got depths={list(depths)}, sizes={list(sizes)}, top_k={top_k}; allowed are depths and top_k from 1 "
                "and sizes from 2, at least one of each"
            )
        self.depths = tuple(sorted(set(depths)))
        self.sizes = tuple(sorted(set(sizes)))
        self.top_k = top_k
        self.max_depth = self.depths[-1]
        self.num_nodes = self.sizes[-1]
        self.num_scratch = (self.max_depth - 1) * top_k

    @property
    def max_nodes(self) -> list[int]:
        """Most nodes a tree of each depth can have."""
        return [DynamicTree(depth, self.top_k, self.num_nodes).num_nodes for depth in self.depths]

    def limit_depth(self, max_depth: int | None) -> TreePolicy:
        if max_depth is None or self.max_depth <= max_depth:
            return self
        depths = {min(depth, max_depth) for depth in self.depths}
        return AutoTree(sorted(depths), self.sizes, self.top_k)

    def tree_of(self, depth: int, num_nodes: int) -> DynamicTree:
        return DynamicTree(depth, self.top_k, num_nodes)

    def grow(
        self, drafter: Drafter, state: Any, root_ids: Tensor, draft: DraftLogits, sampling: DraftSampling
    ) -> TokenTree:
        """The largest tree."""
        return self.tree_of(self.max_depth, self.num_nodes).grow(drafter, state, root_ids, draft, sampling)

    def find_places(self, tree: TokenTree, path: Tensor) -> Tensor:
        """Places of the accepted nodes in the order of scores, from which `TreePlanner` learns.

        Args:
            path: [B, P] node indices, root first.

        Returns:
            [B, D, max_depth] long: entry [d, j] is the place (0 = best, ties by index) of the path's node of depth
            j + 1 among the nodes of at most `depths[d]`; columns beyond the path hold what the planner never reads.
        """
        scores, depths = tree.log_probs, tree.depths
        nodes = torch.arange(tree.num_nodes, device=path.device)
        own, own_node = scores.gather(1, path[:, 1:])[..., None], path[:, 1:, None]  # [B, P - 1, 1]
        is_better = (scores[:, None] > own) | ((scores[:, None] == own) & (nodes < own_node))
        is_better = is_better & (tree.parents >= 0)[:, None]  # [B, P - 1, N], neither the root nor padding
        limits = torch.tensor(self.depths, device=path.device)
        within = depths[:, None] <= limits[:, None]  # [B, D, N]
        places = (is_better[:, None] & within[:, :, None]).sum(-1)  # [B, D, P - 1]
        return torch.nn.functional.pad(places, (0, self.max_depth - places.shape[-1]))
