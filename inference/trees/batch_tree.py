"""BatchTree: dynamic trees that share one budget of nodes, so that rows whose drafts are good get more of them.

Legend: B batch, N nodes drafted for a row, W nodes of the largest tree that is verified, root included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.sampling import DraftSampling
from draftsmith.inference.trees.dynamic import DynamicTree
from draftsmith.inference.trees.node_costs import NodeCosts
from draftsmith.inference.trees.survival import Survival
from draftsmith.inference.trees.token_tree import TokenTree


class BatchTree(DynamicTree):
    """Every row drafts a `DynamicTree`; of the nodes of all rows, the ones most likely to be accepted are verified.
    `Step.batch_trees` says where.

    How many: as many as give the most tokens for the time, by the rates at which such nodes were accepted (`Survival`)
    and by what a node takes (`NodeCosts`). Texts do not depend on it, with exact acceptance.

    Worked example, survival in two rows, when a step without drafts takes as long as 4 nodes:

        row 0    0.9  0.8  0.7     row 1    0.3  0.1
        nodes    0     1     2     3     4     5
        tokens   2     2.9   3.7   4.4   4.7   4.8
        time     4     5     6     7     8     9
        rate     0.50  0.58  0.617 0.629 0.59  0.53     three nodes, all in row 0

    Args:
        depth, top_k, num_nodes: of the trees that are drafted.
    """

    usual_nodes = 3

    def __init__(self, depth: int = 4, top_k: int = 4, num_nodes: int = 16) -> None:
        super().__init__(depth, top_k, num_nodes)
        self._costs = NodeCosts()
        greedy, sampled = Survival(self.max_depth), Survival(self.max_depth)
        self._survivals, self._survival = (greedy, sampled), greedy  # the last is that of the present step

    def limit_depth(self, max_depth: int | None) -> BatchTree:
        """One of the decoder's own, which has learned nothing yet."""
        return BatchTree(min(self.max_depth, max_depth or self.max_depth), self.top_k, self.num_nodes)

    def grow(
        self, drafter: Drafter, state: Any, root_ids: Tensor, draft: DraftLogits, sampling: DraftSampling
    ) -> TokenTree:
        tree = super().grow(drafter, state, root_ids, draft, sampling)
        self._survival = self._survivals[sampling.warp is not None]
        return keep_nodes(tree, self.choose(self._survival.predict(tree)))

    def choose(self, survival: Tensor) -> Tensor:
        """[B, N] bool, the nodes to verify, each with its parent; survival: [B, N], falling along every path."""
        batch, num_nodes = survival.shape
        # The sort is stable and parents come before their children, so they do so among equals, too.
        best, order = survival[:, 1:].flatten().sort(descending=True, stable=True)
        steps = torch.arange(len(best) + 1, device=best.device)
        tokens = batch + torch.cat([best.new_zeros(1), best.cumsum(0)])
        most = (tokens / (self._costs.fixed(batch) + steps)).argmax()
        is_chosen = torch.empty_like(best, dtype=torch.bool)
        is_chosen[order] = steps[1:] <= most
        roots = is_chosen.new_ones(batch, 1)
        return torch.cat([roots, is_chosen.view(batch, num_nodes - 1)], dim=1)

    def learn(self, tree: TokenTree, path: Tensor, seconds: float) -> None:
        """Takes in a step with a tree of this policy: path [B, P] long, the accepted nodes, padded with the root."""
        self._survival.learn(tree, path)
        self._costs.learn(len(tree.token_ids), tree.num_read - len(tree.token_ids), seconds)


def keep_nodes(tree: TokenTree, is_kept: Tensor) -> TokenTree:
    """The trees of the nodes that are kept [B, N] bool, roots and parents among them, in their order; rows with fewer
    than W end with padding."""
    widths = is_kept.sum(1).tolist()
    kept = is_kept.byte().sort(dim=1, descending=True, stable=True).indices[:, : max(widths)]
    is_real = is_kept.gather(1, kept)
    places = is_kept.cumsum(1) - 1  # of each kept node in the new tree
    parents = tree.parents.gather(1, kept)
    parents = places.gather(1, parents.clamp(min=0)).where(is_real & (parents >= 0), torch.full_like(parents, -1))
    return TokenTree(
        token_ids=tree.token_ids.gather(1, kept),
        parents=parents,
        depths=tree.depths.gather(1, kept) * is_real,
        log_probs=tree.log_probs.gather(1, kept).masked_fill(~is_real, -torch.inf),
        max_depth=tree.max_depth,
        widths=widths,
    )
