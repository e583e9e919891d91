"""AutoTree: trees of several sizes to choose from while decoding (`tree="auto"`, `tree="gamma"`).

Legend: B batch, N tree nodes, P path length (root included).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.trees.dynamic import DynamicTree
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.token_tree import TokenTree

# (depth, top_k, nodes): from the cheapest tree to the default of `DynamicTree`. Batches need those with few nodes.
SIZES = (
    *((2, 1, 3), (3, 1, 4), (4, 1, 5), (1, 2, 4), (2, 2, 4), (3, 2, 6), (4, 2, 8), (2, 4, 8), (3, 4, 8), (4, 4, 12)),
    *((4, 8, 16), (6, 2, 12), (6, 4, 16), (6, 8, 24), (6, 8, 32)),
)
MAX_GAMMA = 8


class AutoTree(TreePolicy):
    """Dynamic trees of several sizes. The decoder's planner chooses one of them, or none, every few steps.

    Args:
        trees: those to choose from. Compiled, all share their graphs.
    """

    is_chosen = True

    def __init__(self, trees: Sequence[DynamicTree] | None = None) -> None:
        trees = [DynamicTree(*size) for size in SIZES] if trees is None else list(trees)
        if not trees:
            raise ValueError("AutoTree got no trees: give at least one DynamicTree to choose from")
        sizes = {(tree.max_depth, tree.top_k, tree.num_nodes): tree for tree in trees}
        self.trees = tuple(sizes.values())
        self.largest = max(trees, key=lambda tree: (tree.num_nodes, tree.max_depth, tree.top_k))
        self.max_depth = max(tree.max_depth for tree in trees)
        self.num_nodes = self.largest.num_nodes
        self.num_scratch = max(tree.num_scratch for tree in trees)
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def candidates(self) -> tuple[DynamicTree, ...]:
        return self.trees

    @property
    def is_chain(self) -> bool:
        return all(tree.is_chain for tree in self.trees)

    def limit_depth(self, max_depth: int | None) -> TreePolicy:
        if max_depth is None or self.max_depth <= max_depth:
            return self
        return AutoTree([tree.limit_depth(max_depth) for tree in self.trees])

    def grow(self, *args: Any, **kwargs: Any) -> TokenTree:
        """The largest tree."""
        return self.largest.grow(*args, **kwargs)

    def count_accepted(self, tree: TokenTree, path: Tensor, counts: Tensor) -> Tensor:
        """Exact for candidates that only have fewer nodes than the tree; nearly so for shallower and narrower ones; too
        low for larger ones.

        A smaller tree keeps the best scores among the nodes of its depth that its beam drafts. So the places of the
        accepted nodes in the order of scores tell which of them it would hold.
        """
        assert tree.widths is not None
        sizes, beams, beam_of = self._tables_on(path.device)
        depth, num_nodes, width = sizes[..., None]  # each [candidates, 1]
        beam_depth, beam_width = beams[..., None]  # each [beams, 1]
        scores, steps = tree.log_probs, torch.arange(path.shape[1] - 1, device=path.device)
        nodes = torch.arange(tree.num_nodes, device=path.device)
        own, own_node = scores.gather(1, path[:, 1:])[..., None], path[:, 1:, None]  # [B, P - 1, 1]
        is_better = (scores[:, None] > own) | ((scores[:, None] == own) & (nodes < own_node))
        is_better = is_better & (tree.parents >= 0)[:, None]  # [B, P - 1, N], neither the root nor padding
        is_drafted = (tree.depths[:, None] <= beam_depth) & (tree.widths[:, None] <= beam_width)  # [B, beams, N]
        places = (is_better[:, None] & is_drafted[:, :, None]).sum(-1)[:, beam_of]  # [B, candidates, P - 1]; 0 = best
        is_kept = (places < num_nodes - 1) & (tree.widths.gather(1, path[:, 1:])[:, None] <= width)
        counted: Tensor = (is_kept & (steps < torch.minimum(depth, counts[:, None, None] - 1))).sum(-1)
        return counted

    def _tables_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """depth, num_nodes and top_k of the candidates [3, candidates]; depth and top_k of all beams [2, beams]; the
        beam that each candidate's tree is chosen from [candidates]."""
        if device not in self._tables:
            beams = sorted({(tree.max_depth, tree.top_k) for tree in self.trees})
            self._tables[device] = (
                torch.tensor([(t.max_depth, t.num_nodes, t.top_k) for t in self.trees], device=device).T.contiguous(),
                torch.tensor(beams, device=device).T.contiguous(),
                torch.tensor([beams.index((tree.max_depth, tree.top_k)) for tree in self.trees], device=device),
            )
        return self._tables[device]


def gamma_chain(max_gamma: int = MAX_GAMMA) -> AutoTree:
    """Chains of 1 to `max_gamma` tokens to choose from: gamma of Leviathan et al. (arXiv 2211.17192), from measured
    acceptance and costs instead of their formula."""
    if max_gamma < 1:
        raise ValueError(f"max_gamma is {max_gamma}; a chain has at least 1 token")
    return AutoTree([DynamicTree(gamma, 1, gamma + 1, root_factor=1) for gamma in range(1, max_gamma + 1)])
