"""AutoTree: dynamic trees whose depth, width and number of nodes are chosen at every step (`tree="auto"`).

Legend: B batch, N tree nodes, P path length (root included).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inference.drafters.base import Drafter, DraftLogits
from inference.drafters.sampling import DraftSampling
from inference.planning.cost_model import Plan
from inference.trees.beam import ROOT_FACTOR
from inference.trees.policy import DynamicTree, TreePolicy
from inference.trees.token_tree import TokenTree


class AutoTree(TreePolicy):
    """Trees of EAGLE-2's kind (`DynamicTree`) in several sizes; `TreePlanner` says which one pays.

    Args:
        depths, sizes, widths: depths, numbers of nodes (root included) and `top_k` of `DynamicTree` to choose from.
            Compiled, all share their graphs.
        root_factor: as in `DynamicTree`.
    """

    def __init__(
        self,
        depths: Sequence[int] = (1, 2, 3, 4, 6),
        sizes: Sequence[int] = (4, 8, 16, 32),
        widths: Sequence[int] = (2, 4, 8),
        *,
        root_factor: int = ROOT_FACTOR,
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
        self.root_factor = root_factor
        self.max_depth = self.depths[-1]
        self.num_nodes = self.sizes[-1]
        self.num_scratch = (self.max_depth - 1) * self.top_k
        every = itertools.starmap(Plan, itertools.product(self.depths, self.sizes, self.widths))
        # All trees there are to choose from: those with a node on every level that can have all their nodes.
        self.plans = [plan for plan in every if plan.depth < plan.num_nodes == self.tree_of(plan).num_nodes]
        self.sizes = tuple(sorted({plan.num_nodes for plan in self.plans})) or self.sizes
        self.num_nodes = self.sizes[-1]
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def is_chain(self) -> bool:
        return self.root_factor * self.top_k == 1

    def limit_depth(self, max_depth: int | None) -> TreePolicy:
        if max_depth is None or self.max_depth <= max_depth:
            return self
        depths = {min(depth, max_depth) for depth in self.depths}
        return AutoTree(sorted(depths), self.sizes, self.widths, root_factor=self.root_factor)

    def tree_of(self, plan: Plan) -> DynamicTree:
        return DynamicTree(plan.depth, plan.width, plan.num_nodes, root_factor=self.root_factor)

    def grow(
        self, drafter: Drafter, state: Any, root_ids: Tensor, draft: DraftLogits, sampling: DraftSampling
    ) -> TokenTree:
        """The largest tree."""
        largest = self.tree_of(Plan(self.max_depth, self.num_nodes, self.top_k))
        return largest.grow(drafter, state, root_ids, draft, sampling)

    def count_accepted(self, tree: TokenTree, path: Tensor, counts: Tensor) -> Tensor:
        """What each plan would have accepted in this tree's place, from which `TreePlanner` learns.

        A smaller tree holds the nodes with the best scores among those of its depth that its beam drafts, so the places
        of the accepted nodes in that order tell.

        Args:
            path: [B, P] accepted node indices, root first; counts: [B] how many of them are real (0: a finished row).

        Returns:
            [B, plans] long, drafted tokens, in the order of `plans`; true for plans that are in nothing larger than the
            tree's own.
        """
        assert tree.widths is not None
        plans, beams, beam_of = self._tables_on(path.device)
        depth, num_nodes, width = plans[..., None]  # each [plans, 1]
        beam_depth, beam_width = beams[..., None]  # each [beams, 1]
        scores, steps = tree.log_probs, torch.arange(path.shape[1] - 1, device=path.device)
        nodes = torch.arange(tree.num_nodes, device=path.device)
        own, own_node = scores.gather(1, path[:, 1:])[..., None], path[:, 1:, None]  # [B, P - 1, 1]
        is_better = (scores[:, None] > own) | ((scores[:, None] == own) & (nodes < own_node))
        is_better = is_better & (tree.parents >= 0)[:, None]  # [B, P - 1, N], neither the root nor padding
        is_drafted = (tree.depths[:, None] <= beam_depth) & (tree.widths[:, None] <= beam_width)  # [B, beams, N]
        places = (is_better[:, None] & is_drafted[:, :, None]).sum(-1)[:, beam_of]  # [B, plans, P - 1]; 0 = best
        is_kept = (places < num_nodes - 1) & (tree.widths.gather(1, path[:, 1:])[:, None] <= width)
        counted: Tensor = (is_kept & (steps < torch.minimum(depth, counts[:, None, None] - 1))).sum(-1)
        return counted

    def _tables_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """depth, num_nodes and width of the plans [3, plans]; depth and width of all beams [2, beams]; which beam each
        plan's tree is chosen from [plans]."""
        if device not in self._tables:
            plans = [(plan.depth, plan.num_nodes, plan.width) for plan in self.plans]
            beams = sorted({(depth, width) for depth, _, width in plans})
            beam_of = [beams.index((depth, width)) for depth, _, width in plans]
            self._tables[device] = (
                torch.tensor(plans, device=device).T.contiguous(),
                torch.tensor(beams, device=device).T.contiguous(),
                torch.tensor(beam_of, device=device),
            )
        return self._tables[device]
