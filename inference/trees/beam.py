"""The beam that dynamic trees are grown with: levels of drafted nodes, and the best of them all as a tree.

Legend: B batch, W frontier nodes of one level, M nodes drafted for it, C candidate columns, k children per node,
P nodes of the pool that a tree is chosen from.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inference.drafters.base import Drafter, DraftLogits
from inference.drafters.sampling import DraftSampling
from inference.trees.token_tree import TokenTree

# The root has up to so many times as many children as a beam is wide: their scores are known anyway.
ROOT_FACTOR = 2


@dataclass(frozen=True)
class Children:
    """All drafted nodes of one level, M of them, and the W best, whose children are drafted next.

    token_ids, scores: [B, M]; parents: [B, M] indices into all nodes of the level above (-1 for children of the root);
    widths: [B, M] as in `TokenTree`. best: [B, W] indices into these; best_ids, best_scores: [B, W]; best_parents:
    [B, W] their parents as indices into the best of the level above (0 for children of the root).
    """

    token_ids: Tensor
    scores: Tensor
    parents: Tensor
    widths: Tensor
    best: Tensor
    best_ids: Tensor
    best_scores: Tensor
    best_parents: Tensor

    @classmethod
    def of_root(cls, scores: Tensor, token_ids: Tensor, width: int, root_factor: int = ROOT_FACTOR) -> Children:
        """scores, token_ids: [B, M], best first."""
        # Of the strides that later levels have, too: a graph serves tensors of one layout.
        best_ids, best_scores = (x[:, :width].clone(memory_format=torch.contiguous_format) for x in (token_ids, scores))
        ranks = torch.arange(token_ids.shape[1], device=token_ids.device).repeat(token_ids.shape[0], 1)
        best = torch.arange(best_ids.shape[1], device=token_ids.device).repeat(token_ids.shape[0], 1)
        widths, parents = ranks // root_factor + 1, torch.full_like(ranks, -1)
        return cls(token_ids, scores, parents, widths, best, best_ids, best_scores, torch.zeros_like(best))


@dataclass(frozen=True)
class Pool:
    """All drafted nodes of all levels, [B, P] each: parents are indices into the pool (-1: the root); the rest as in
    `Children`. A parent stands before its children."""

    token_ids: Tensor
    scores: Tensor
    parents: Tensor
    widths: Tensor

    @classmethod
    def of_levels(cls, levels: Sequence[Children]) -> Pool:
        parents, offset = [levels[0].parents], 0
        for above, level in itertools.pairwise(levels):
            parents.append(level.parents + offset)
            offset += above.token_ids.shape[1]
        token_ids, scores, widths = (
            torch.cat([getattr(level, name) for level in levels], 1) for name in ("token_ids", "scores", "widths")
        )
        return cls(token_ids, scores, torch.cat(parents, 1), widths)


def choose_best(root_ids: Tensor, pool: Pool, num_nodes: int, max_depth: int) -> TokenTree:
    """The tree of the pool's best nodes, behind `root_ids` [B].

    A stable sort breaks ties by index, so that a parent always outranks its child, even one of probability 1.

    Args:
        num_nodes: nodes to keep, root included.
        max_depth: of the pool's nodes.
    """
    batch, pool_size = pool.token_ids.shape
    device = root_ids.device
    keep = min(num_nodes - 1, pool_size)
    kept = pool.scores.sort(dim=-1, descending=True, stable=True).indices[:, :keep].sort(dim=-1).values
    # Tree index of each pool node; the last entry stands for the root, which pool parents call -1.
    place = torch.zeros(batch, pool_size + 1, dtype=torch.long, device=device)
    place.scatter_(1, kept, torch.arange(1, keep + 1, device=device).expand(batch, -1))
    kept_parents = place.gather(1, pool.parents.gather(1, kept) % (pool_size + 1))
    root = torch.zeros(batch, 1, dtype=torch.long, device=device)
    parents = torch.cat([root - 1, kept_parents], dim=1)
    depths = torch.zeros_like(parents)
    for _ in range(max_depth):
        depths = torch.where(parents >= 0, depths.gather(1, parents.clamp(min=0)) + 1, depths)
    return mask_absent(
        TokenTree(
            token_ids=torch.cat([root_ids[:, None], pool.token_ids.gather(1, kept)], dim=1),
            parents=parents,
            depths=depths,
            log_probs=torch.cat([root.float(), pool.scores.gather(1, kept)], dim=1),
            max_depth=max_depth,
            widths=torch.cat([root + 1, pool.widths.gather(1, kept)], dim=1),
        )
    )


def expand_level(
    drafter: Drafter, state: Any, level: Children, depth: int, top_k: int, sampling: DraftSampling
) -> Children:
    """The children of a level's best nodes.

    Its shapes are the same at every depth, and only the drafter is told which one it is.

    Args:
        depth: of the best nodes.
        sampling: its noise is that of this depth alone, [B, 1, V].
    """
    draft = drafter.expand(state, level.best_ids, level.best_parents, depth)
    top, ids = top_candidates(draft, sampling, 0, top_k)
    scores = (level.best_scores[:, :, None] + top).flatten(1)  # [B, W * k]
    batch, width = level.best_ids.shape
    ids = ids.expand(-1, width, -1).flatten(1)
    parents = level.best[:, :, None].expand(-1, -1, top.shape[-1]).flatten(1)
    places, ranks = torch.arange(1, width + 1, device=ids.device), torch.arange(1, top.shape[-1] + 1, device=ids.device)
    needed = torch.maximum(level.widths.gather(1, level.best), places)  # for a node to be in the beam
    widths = torch.maximum(needed[:, :, None], ranks).expand(batch, width, -1).flatten(1)
    best_scores, best = scores.topk(min(top_k, scores.shape[1]), dim=-1)
    return Children(ids, scores, parents, widths, best, ids.gather(1, best), best_scores, best // top.shape[-1])


def top_candidates(draft: DraftLogits, sampling: DraftSampling, depth: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The best children of nodes at `depth`: log-scores and target token ids, both [B, W or 1, min(top_k, C)]."""
    scores = sampling.score(draft, depth)
    top, columns = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
    if draft.token_ids is None:
        return top, columns
    if draft.token_ids.dim() == 1:
        return top, draft.token_ids[columns]
    return top, draft.token_ids.gather(-1, columns)


def mask_absent(tree: TokenTree) -> TokenTree:
    """Turns nodes of score -inf (the drafter had no such candidate) into padding, which hangs on nothing."""
    absent = tree.log_probs.isneginf()
    parents, depths = tree.parents.masked_fill(absent, -1), tree.depths.masked_fill(absent, 0)
    return replace(tree, parents=parents, depths=depths)
