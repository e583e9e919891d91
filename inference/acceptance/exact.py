"""Exact acceptance: draw the target's own next token at every node, then walk along the drafts that carry it.

At each node the target's processed distribution gives one token: the argmax of its log-probabilities, plus Gumbel
noise keyed by (row seed, absolute position) when sampling. If a child carries that token the walk steps there; if none
does, it is the bonus token and the walk ends. So the text depends on (target, seed) only, not on drafts.

Tokens are drawn only at the nodes of the walk, one per depth. Drawing at all nodes first gives the same path, but top-p
on a tree of 32 nodes then costs five times as much (it sorts every row), and an argmax of all rows costs more too.

Legend: B batch, N tree nodes, K depth, V target vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.acceptance.sampler import Sampler, pick_token
from draftsmith.inference.trees.token_tree import TokenTree


@dataclass(frozen=True)
class Acceptance:
    """The result of one verify step.

    Worked example, the tree of TokenTree's docstring, when the target says "cat" after the root, "ran" after "cat" and
    "away" after "ran":

        path         0  1  4      the root, "cat", "ran"
        counts       3
        next_tokens  cat  ran  away

    Attributes:
        path: [B, K+1] long, accepted nodes, root first; entries from counts[b] on are 0 (padding).
        counts: [B] long, nodes on the path, root included (>= 1). It is also the number of tokens emitted.
        next_tokens: [B, K+1] long, accepted drafted tokens, then the bonus token; entries from counts[b] on are 0.
            `NO_TOKEN` where none could be picked.
        scores: [B, K+1, V] float32, the target's processed scores that gave the tokens (from counts[b] on:
            anything), if the sampler keeps them.
    """

    path: Tensor
    counts: Tensor
    next_tokens: Tensor
    scores: Tensor | None = None


class TreeWalk:
    """All rows, each at one node; a step takes them one level down. Rows that have ended go on, and emit padding.

    Nothing is read on the host, except with lazy processors: each `score` reads once which rows walk. Lazy processors
    are not asked about more tokens than plain decoding would emit.

    Args:
        logits: [B, N, V], the target's.

    Attributes:
        current: [B] long, each row's node.
        is_walking: [B] bool, whether the row emits the next token.
    """

    def __init__(self, sampler: Sampler, logits: Tensor) -> None:
        self.sampler, self.logits, self._texts = sampler, logits, sampler.texts
        self.rows = torch.arange(logits.shape[0], device=logits.device)
        self.current = torch.zeros_like(self.rows)
        self._path: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._walked: list[Tensor] = []
        self._scores: list[Tensor] = []
        self.is_walking = self._may_emit() if sampler.is_lazy else torch.ones_like(self.rows, dtype=torch.bool)

    def score(self) -> Tensor:
        """[B, V], the processed scores at the rows' nodes, as in plain decoding. Call it once before each step."""
        scores = self.sampler.process(self.logits[self.rows, self.current], self._texts, self.is_walking)
        if self.sampler.keeps_scores:
            self._scores.append(scores.float())
        return scores

    def step(self, tokens: Tensor, children: Tensor, is_accepted: Tensor) -> None:
        """Emits `tokens` [B] and goes on to `children` [B] long in the rows where a child [B] bool is accepted."""
        self._path.append(self.current)
        self._tokens.append(tokens)
        self._walked.append(self.is_walking)
        if self._texts is not None:
            self._texts = self._texts.extended(tokens)
        self.is_walking = self.is_walking & is_accepted
        if self.sampler.is_lazy:
            self.is_walking = self.is_walking & self._may_emit()
        self.current = children

    def _may_emit(self) -> Tensor:
        """[B] bool, whether lazy processors may be asked about one more token."""
        sampler = self.sampler
        assert self._texts is not None, "lazy processors read texts"
        may = self._texts.lengths < self._texts.limits
        return may & ~sampler.are_ends(self._tokens[-1]) if self._tokens else may

    def acceptance(self) -> Acceptance:
        is_real = torch.stack(self._walked, dim=1)  # [B, K+1]
        path, tokens = torch.stack(self._path, dim=1) * is_real, torch.stack(self._tokens, dim=1) * is_real
        scores = torch.stack(self._scores, dim=1) if self._scores else None
        return Acceptance(path, is_real.sum(1), tokens, scores)


def accept_exact(
    sampler: Sampler,
    tree: TokenTree,
    logits: Tensor,
    root_positions: Tensor,
    *,
    noise: Tensor | None = None,
) -> Acceptance:
    """Walks down the tree along the target's own tokens.

    Args:
        logits: [B, N, V] the target's logits at every node, any floating dtype.
        root_positions: [B] long, absolute position of node 0 (the cache's lengths at the time of the verify step).
        noise: from `sampler.draw_noise` for at least `tree.path_width` depths; None = drawn here.

    Returns:
        Acceptance, without any host synchronisation; for a lazy sampler with one per depth.
    """
    if noise is None:
        noise = sampler.draw_noise(root_positions, tree.path_width, logits.shape[-1])
    walk, num_nodes = TreeWalk(sampler, logits), tree.num_nodes
    nodes = torch.arange(num_nodes, device=logits.device)
    for depth in range(tree.path_width):  # also for rows that have ended, so that nothing is read on the host
        token = pick_token(walk.score(), None if noise is None else noise[:, depth])  # [B]
        fits = (tree.parents == walk.current[:, None]) & (tree.token_ids == token[:, None])  # [B, N]
        child = torch.where(fits, nodes, num_nodes).amin(-1)  # the first that fits
        walk.step(token, child % num_nodes, child < num_nodes)
    return walk.acceptance()
