"""Exact acceptance: draw the target's own next token at every node, then walk along the drafts that carry it.

At each node the target's processed distribution gives one token: the argmax of its log-probabilities, plus Gumbel
noise keyed by (row seed, absolute position) when sampling. If a child carries that token the walk steps there; if none
does, it is the bonus token and the walk ends. So the text depends on (target, seed) only, not on drafts.

Tokens are drawn only at the nodes of the walk, one per depth. Drawing at all nodes first gives the same path, but top-p
on a tree of 32 nodes then costs five times as much (it sorts every row), and an argmax of all rows costs more too.

Legend: B batch, N tree nodes, K depth, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.inference.acceptance.sampler import Sampler, pick_token
from draftsmith.inference.acceptance.walk import Acceptance, Walk
from draftsmith.inference.trees.token_tree import TokenTree


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
    walk, num_nodes = Walk(sampler, logits), tree.num_nodes
    nodes = torch.arange(num_nodes, device=logits.device)
    for depth in range(tree.path_width):  # also for rows that have ended, so that nothing is read on the host
        token = pick_token(walk.score(), None if noise is None else noise[:, depth])  # [B]
        fits = (tree.parents == walk.current[:, None]) & (tree.token_ids == token[:, None])  # [B, N]
        child = torch.where(fits, nodes, num_nodes).amin(-1)  # the first that fits
        walk.step(token, child % num_nodes, child < num_nodes)
    return walk.acceptance()
