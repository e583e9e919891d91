"""CandidateTrees: a few nested trees to choose from while decoding (`tree="auto"`, `tree="gamma"`).

Legend: B batch, N tree nodes, P path length (root included).
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.trees.batch_tree import BatchTree
from draftsmith.inference.trees.dynamic import DynamicTree
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.token_tree import TokenTree

# (depth, top_k, nodes), root included: twice as many nodes each time, few for CPUs and batches, many where passes are
# flat. One width, so that each tree holds those before it; a beam of 4 costs about as much as one of 1.
SIZES = ((1, 4, 2), (1, 4, 4), (2, 4, 8), (3, 4, 16), (6, 4, 32))
MAX_GAMMA = 8


class CandidateTrees(TreePolicy):
    """Nested dynamic trees. The decoder's planner chooses one of them, or none, every few steps.

    Args:
        trees: from small to large; each contains those before it. All share the functions of their levels.
        batch_tree: what rows that share a budget may draft instead, no deeper or larger than the largest tree; None =
            rows share none.
    """

    def __init__(self, trees: Sequence[DynamicTree] | None = None, batch_tree: BatchTree | None = None) -> None:
        if trees is None and batch_tree is None:
            batch_tree = BatchTree()
        trees = [DynamicTree(*size) for size in SIZES] if trees is None else trees
        sizes = {(tree.max_depth, tree.num_nodes): tree for tree in trees}
        self.candidates = tuple(sizes.values())
        assert all(large.contains(small) for small, large in itertools.pairwise(self.candidates)), "trees are nested"
        self.largest, self.batch_tree = self.candidates[-1], batch_tree
        assert batch_tree is None or self.largest.contains(batch_tree), "the state has room for the largest tree"
        self.max_depth, self.num_nodes = self.largest.max_depth, self.largest.num_nodes
        self.num_scratch = self.largest.num_scratch
        self._tables: dict[torch.device, Tensor] = {}

    def limit_depth(self, max_depth: int | None) -> TreePolicy:
        """One of the decoder's own, as its `batch_tree` is."""
        shared = None if self.batch_tree is None else self.batch_tree.limit_depth(max_depth)
        return CandidateTrees([tree.limit_depth(max_depth) for tree in self.candidates], shared)

    def grow(self, *args: Any, **kwargs: Any) -> TokenTree:
        """The largest tree."""
        return self.largest.grow(*args, **kwargs)

    def count_accepted(self, tree: TokenTree, path: Tensor, counts: Tensor) -> Tensor:
        """Drafted tokens [B, candidates] int64 that each candidate would have accepted in the place of `tree`: exact
        for those of its depth with fewer nodes; nearly so for shallower ones, which may hold a node that gave way to a
        deeper one; too low for larger ones.

        A smaller tree keeps the best scores among the nodes of its depth. So the places of the accepted nodes in the
        order of scores tell which of them it would hold.

        Args:
            path: [B, P] accepted node indices, root first; counts: [B] how many of them are real (0: a finished row).
        """
        depth, num_nodes = self.make_table(path.device)[..., None]  # each [candidates, 1]
        scores, steps = tree.log_probs[:, None], torch.arange(path.shape[1] - 1, device=path.device)
        nodes = torch.arange(tree.num_nodes, device=path.device)
        own, own_node = scores[:, 0].gather(1, path[:, 1:])[..., None], path[:, 1:, None]  # [B, P - 1, 1]
        is_better = (scores > own) | ((scores == own) & (nodes < own_node))
        is_better = is_better & (tree.parents >= 0)[:, None]  # [B, P - 1, N], neither the root nor padding
        is_drafted = tree.depths[:, None] <= depth  # [B, candidates, N]
        places = (is_better[:, None] & is_drafted[:, :, None]).sum(-1)  # [B, candidates, P - 1]; 0 = best
        is_kept = (places < num_nodes - 1) & (steps < torch.minimum(depth, counts[:, None, None] - 1))
        counted: Tensor = is_kept.sum(-1)
        return counted

    def make_table(self, device: torch.device) -> Tensor:
        """Depths and numbers of nodes of the candidates [2, candidates], made once for a device."""
        if device not in self._tables:
            sizes = [(tree.max_depth, tree.num_nodes) for tree in self.candidates]
            self._tables[device] = torch.tensor(sizes, device=device).T.contiguous()
        return self._tables[device]


def gamma_chain(max_gamma: int = MAX_GAMMA) -> CandidateTrees:
    """Chains of 1 to `max_gamma` tokens to choose from: gamma of Leviathan et al. (arXiv 2211.17192), from measured
    acceptance and costs instead of their formula."""
    if max_gamma < 1:
        raise ValueError(f"max_gamma is {max_gamma}; a chain has at least 1 token")
    return CandidateTrees([DynamicTree(gamma, 1, gamma + 1, root_factor=1) for gamma in range(1, max_gamma + 1)])
