"""Exact acceptance: draw the target's own next token at every node, then walk along the drafts that carry it.

At each node the target's processed distribution gives one token: the argmax of its log-probabilities, plus Gumbel
noise keyed by (row seed, absolute position) when sampling. If a child carries that token the walk steps there; if none
does, it is the bonus token and the walk ends. So the text is a function of (target, seed) alone, whatever was drafted.

Only the nodes of the walk are drawn at, one per depth. Drawing at all nodes first gives the same path, but top-p on a
tree of 32 nodes then costs five times as much (it sorts every row), and even an argmax of all rows costs more on a CPU.

Legend: B batch, N tree nodes, K depth, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.acceptance.sampler import Sampler, pick_token
from inference.acceptance.walk import WalkScores, may_emit, score_walk
from inference.trees.token_tree import TokenTree


@dataclass(frozen=True)
class Acceptance:
    """What one verify step accepted.

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


def accept_exact(
    sampler: Sampler,
    tree: TokenTree,
    logits: Tensor,
    root_positions: Tensor,
    *,
    noise: Tensor | None = None,
    prefixes: Sequence[Tensor] | None = None,
    max_tokens: Sequence[int] | None = None,
) -> Acceptance:
    """Walk down the tree along the target's own tokens.

    Args:
        sampler: how the target picks tokens.
        tree: what was verified.
        logits: [B, N, V] the target's logits at every node, any floating dtype.
        root_positions: [B] long, absolute position of node 0 (the cache's lengths at the time of the verify step).
        noise: what `sampler.draw_noise` gave for at least `tree.path_width` depths; made here when None.
        prefixes: per row [1, L] long, its tokens up to and including the root. Needed only by processors that are not
            prefix-free.
        max_tokens: per row, how many tokens it may still emit (0: a finished row, whose counts are then 0); only keeps
            those processors from being asked for more.

    Returns:
        Acceptance; for a prefix-free sampler without any host synchronisation, otherwise with one per depth.
    """
    if sampler.do_sample and noise is None:
        noise = sampler.draw_noise(root_positions, tree.path_width, logits.shape[-1])
    return _walk(sampler, tree, score_walk(sampler, logits, prefixes), noise, max_tokens)


def _walk(
    sampler: Sampler, tree: TokenTree, score: WalkScores, noise: Tensor | None, max_tokens: Sequence[int] | None
) -> Acceptance:
    """Draw at one node per row and depth, for every depth of the tree, so that the host is never asked where to go."""
    num_nodes = tree.num_nodes
    nodes = torch.arange(num_nodes, device=tree.token_ids.device)
    current = torch.zeros_like(tree.token_ids[:, 0])
    is_walking = may_emit(sampler, current, 0, [], max_tokens)
    path: list[Tensor] = []
    tokens: list[Tensor] = []
    walked: list[Tensor] = []
    kept: list[Tensor] = []
    for depth in range(tree.path_width):
        row_scores = score(current, tokens, is_walking)  # [B, V]
        token = pick_token(row_scores, None if noise is None else noise[:, depth])  # [B]
        if sampler.keeps_scores:
            kept.append(row_scores.float())
        path.append(current)
        tokens.append(token)
        walked.append(is_walking)
        fits = (tree.parents == current[:, None]) & (tree.token_ids == token[:, None])  # [B, N]
        child = torch.where(fits, nodes, num_nodes).amin(-1)  # the first that fits
        is_walking = is_walking & (child < num_nodes) & may_emit(sampler, current, depth + 1, tokens, max_tokens)
        current = child % num_nodes
    is_real = torch.stack(walked, dim=1)  # [B, K+1]
    scores = torch.stack(kept, dim=1) if kept else None
    return Acceptance(torch.stack(path, dim=1) * is_real, is_real.sum(1), torch.stack(tokens, dim=1) * is_real, scores)
