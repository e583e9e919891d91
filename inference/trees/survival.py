"""Survival: how likely drafted nodes are to be accepted, learned from those that were verified.

A drafter's probability of a token, given the one before, says how often such tokens are accepted, but not in what unit:
n-grams count, heads are over-confident. So tokens of about the same log-probability and depth share a rate; a parent's
best child has another one than its siblings.

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
# What seems hopeless is not verified, so nothing is learned of it. So every ROUND steps rates weigh no more than FEW
# nodes, and in the steps after that the first two children of each node are tried, those of one depth a step.
ROUND, FEW = 96, 32.0


class Survival:
    """Rates of acceptance [2, K, L] of tokens whose parents were accepted: of other siblings, and of best children."""

    def __init__(self, num_depths: int) -> None:
        with torch.inference_mode(False):
            guess = torch.tensor(GUESS, device="cpu").repeat(2, num_depths, 1)
            self._hits, self._seen = PRIOR * guess, torch.full_like(guess, PRIOR)
            self._edges = torch.tensor(EDGES, device="cpu")
        self._num_steps = 0

    def predict(self, tree: TokenTree) -> Tensor:
        """[B, N] float32, how likely each node is to be accepted: never more than its parent. 1 of roots, 0 of padding;
        what is tried counts as its parent does."""
        parents = tree.parents
        log_rates = (self._hits / self._seen).log().clamp(min=ABSENT).flatten()[self._find_cells(tree)]
        log_rates = log_rates.masked_fill(parents < 0, ABSENT)
        log_rates[:, 0] = 0.0
        survival = (tree.ancestors.to(log_rates.dtype) @ log_rates[..., None])[..., 0].exp()
        is_tried = (parents >= 0) & (tree.depths == 1 + self._num_steps % ROUND)
        is_tried[:, 2:] &= parents[:, 2:] != parents[:, :-2]
        return torch.where(is_tried, survival.gather(1, parents.clamp(min=0)), survival)

    def _find_cells(self, tree: TokenTree) -> Tensor:
        """[B, N] long, each node's place in the flat tables."""
        is_best = tree.parents.diff(dim=1, prepend=tree.parents[:, :1]) != 0  # siblings stand together, best first
        steps = tree.log_probs - tree.log_probs.gather(1, tree.parents.clamp(min=0))
        rows = is_best * self._seen.shape[1] + (tree.depths - 1).clamp(min=0)
        return rows * len(GUESS) + torch.bucketize(steps, self._edges)

    def learn(self, tree: TokenTree, path: Tensor) -> None:
        """Takes in which nodes were accepted: path [B, P] long, from the root, with which it is padded."""
        is_accepted = torch.zeros_like(tree.parents, dtype=torch.bool).scatter_(1, path, torch.ones_like(path).bool())
        is_judged = (tree.parents >= 0) & is_accepted.gather(1, tree.parents.clamp(min=0))
        cells = self._find_cells(tree).flatten()
        for table, values in ((self._hits, is_accepted & is_judged), (self._seen, is_judged)):
            table.view(-1).index_add_(0, cells, values.flatten().to(table.dtype))
        self._num_steps += 1
        shrink = ((MOST if self._num_steps % ROUND else FEW) / self._seen).clamp(max=1.0)
        self._hits *= shrink
        self._seen *= shrink
