"""Survival: how likely drafted nodes are to be accepted, learned from those that were verified.

A drafter's probability of a token, given the one before, says how often such tokens are accepted, but not in what unit:
n-grams count, heads are over-confident. So tokens of about the same log-probability and depth share a rate.

Legend: B batch, N tree nodes, K depths, L levels of log-probabilities.
"""

import torch
from torch import Tensor

from draftsmith.inference.trees.token_tree import TokenTree

# Between levels of log-probabilities, and a first guess of each level's rate.
EDGES = (-6.0, -4.5, -3.5, -2.7, -2.0, -1.5, -1.05, -0.7, -0.4, -0.2, -0.08)
GUESS = (0.004, 0.01, 0.02, 0.04, 0.08, 0.13, 0.2, 0.3, 0.45, 0.6, 0.75, 0.85)
PRIOR = 8.0  # nodes that the guess weighs as much as
MOST = 400.0  # nodes that a rate is the mean of, about
ABSENT = -1e4  # log-rate of nodes that are padding


class Survival:
    """Rates of acceptance [K, L] of drafted tokens whose parents were accepted."""

    def __init__(self, num_depths: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            guess = torch.tensor(GUESS, device=device).repeat(num_depths, 1)
            self._hits, self._seen = PRIOR * guess, torch.full_like(guess, PRIOR)
            self._edges = torch.tensor(EDGES, device=device)

    def predict(self, tree: TokenTree) -> Tensor:
        """[B, N] float32, how likely each node is to be accepted: never more than its parent. 1 of roots, 0 of
        padding."""
        log_rates = (self._hits / self._seen).log().flatten()[self._find_cells(tree)]
        log_rates = log_rates.masked_fill(tree.parents < 0, ABSENT)
        log_rates[:, 0] = 0.0
        return (tree.ancestors.to(log_rates.dtype) @ log_rates[..., None])[..., 0].exp()

    def _find_cells(self, tree: TokenTree) -> Tensor:
        """[B, N] long, each node's place in the flat tables."""
        steps = tree.log_probs - tree.log_probs.gather(1, tree.parents.clamp(min=0))
        return (tree.depths - 1).clamp(min=0) * len(GUESS) + torch.bucketize(steps, self._edges)

    def learn(self, tree: TokenTree, path: Tensor) -> None:
        """Takes in which nodes were accepted: path [B, P] long, from the root, with which it is padded."""
        is_accepted = torch.zeros_like(tree.parents, dtype=torch.bool).scatter_(1, path, torch.ones_like(path).bool())
        is_judged = (tree.parents >= 0) & is_accepted.gather(1, tree.parents.clamp(min=0))
        cells = self._find_cells(tree).flatten()
        for table, values in ((self._hits, is_accepted & is_judged), (self._seen, is_judged)):
            table.view(-1).index_add_(0, cells, values.flatten().to(table.dtype))
        shrink = (MOST / self._seen).clamp(max=1.0)
        self._hits *= shrink
        self._seen *= shrink
