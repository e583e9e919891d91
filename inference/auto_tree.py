"""AutoTree: dynamic trees whose depth, width and number of nodes are chosen at every step (`tree="auto"`).

Legend: B batch, N tree nodes, P path length (root included), D number of depths to choose from, W number of widths.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inference.cost_model import Plan
from inference.drafter import Drafter, DraftLogits, DraftSampling
from inference.policy import DynamicTree, TreePolicy
from inference.tree import TokenTree


class AutoTree(TreePolicy):
    """Trees of EAGLE-2's kind (`DynamicTree`) in several sizes; `TreePlanner` says which one pays.

    Args:
        depths, sizes, widths: depths, numbers of nodes (root included) and `top_k` of `DynamicTree` to choose from.
            Compiled, each size and each width is a graph of its own.
    """

    def __init__(
        self,
        depths: Sequence[int] = (1, 2, 3, 4, 6),
        sizes: Sequence[int] = (8, 16, 32),
        widths: Sequence[int] = (4, 8),
    ) -> None:
        if not depths or not sizes or not widths or min(depths) < 1 or min(sizes) < 2 or min(widths) < 1:
            raise ValueError(
                f"got depths={list(depths)}, sizes={list(sizes)}, widths={list(widths)}; allowed are depths and widths "
                "from 1 and sizes from 2, at least one of each"
            )
        self.depths = tuple(sorted(set(depths)))
        self.sizes = tuple(sorted(set(sizes)))
        self.widths = tuple(sorted(set(widths)))
        self.top_k = self.widths[-1]
        self.max_depth = self.depths[-1]
        self.num_nodes = self.sizes[-1]
        self.num_scratch = (self.max_depth - 1) * self.top_k
        self.pool_size = DynamicTree(self.max_depth, self.top_k).pool_size

    @property
    def plans(self) -> list[Plan]:
        """All trees there are to choose from: those with a node on every level that can have all their nodes."""
        return [
            plan
            for plan in itertools.starmap(Plan, itertools.product(self.depths, self.sizes, self.widths))
            if plan.depth < plan.num_nodes == self.tree_of(plan).num_nodes
        ]

    def limit_depth(self, max_depth: int | None) -> TreePolicy:
        if max_depth is None or self.max_depth <= max_depth:
            return self
        depths = {min(depth, max_depth) for depth in self.depths}
        return AutoTree(sorted(depths), self.sizes, self.widths)

    def tree_of(self, plan: Plan) -> DynamicTree:
        return DynamicTree(plan.depth, plan.width, plan.num_nodes)

    def grow(
        self, drafter: Drafter, state: Any, root_ids: Tensor, draft: DraftLogits, sampling: DraftSampling
    ) -> TokenTree:
        """The largest tree."""
        largest = DynamicTree(self.max_depth, self.top_k, self.num_nodes)
        return largest.grow(drafter, state, root_ids, draft, sampling)

    def find_places(self, tree: TokenTree, path: Tensor) -> Tensor:
        """Places of the accepted nodes in the order of scores, from which `TreePlanner` learns.

        Args:
            path: [B, P] node indices, root first.

        Returns:
            [B, D, W, max_depth] long: entry [d, w, j] is the place (0 = best, ties by index) of the path's node of
            depth j + 1 among the nodes of at most `depths[d]` that a beam of `widths[w]` would have drafted (N if it
            would not have drafted that node itself); columns beyond the path hold what the planner never reads.
        """
        assert tree.widths is not None
        scores, depths = tree.log_probs, tree.depths
        nodes = torch.arange(tree.num_nodes, device=path.device)
        own, own_node = scores.gather(1, path[:, 1:])[..., None], path[:, 1:, None]  # [B, P - 1, 1]
        is_better = (scores[:, None] > own) | ((scores[:, None] == own) & (nodes < own_node))
        is_better = is_better & (tree.parents >= 0)[:, None]  # [B, P - 1, N], neither the root nor padding
        deepest = torch.tensor(self.depths, device=path.device)[:, None, None]  # [D, 1, 1]
        widest = torch.tensor(self.widths, device=path.device)[:, None]  # [W, 1]
        within = (depths[:, None, None] <= deepest) & (tree.widths[:, None, None] <= widest)  # [B, D, W, N]
        places = (is_better[:, None, None] & within[..., None, :]).sum(-1)  # [B, D, W, P - 1]
        is_drafted = tree.widths.gather(1, path[:, 1:])[:, None, None] <= widest
        places = torch.where(is_drafted, places, tree.num_nodes)
        return torch.nn.functional.pad(places, (0, self.max_depth - places.shape[-1]))
