"""DynamicTree: EAGLE-2's trees, whose shape follows the drafter's scores, and the beam they are grown with.

Legend: B batch, W frontier nodes of one level, M nodes drafted for it, C candidate columns, k children per node,
P nodes of the pool that a tree is chosen from.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference.drafters.base import Drafter, DraftLogits
from inference.drafters.sampling import DraftSampling
from inference.trees.policy import Run, TreePolicy, mask_absent, run_eagerly
from inference.trees.token_tree import TokenTree

# The root has up to this many times as many children as a beam is wide: their scores are known anyway.
ROOT_FACTOR = 2


class DynamicTree(TreePolicy):
    """EAGLE-2 (arXiv 2406.16858, section 4): per level the `top_k` most likely nodes are expanded into `top_k` children
    each; the whole pool is then re-ranked and the best nodes are verified.

    Args:
        depth: levels of the tree.
        top_k: beam width and children per node.
        num_nodes: nodes verified, root included.
        root_factor: the root has up to root_factor x top_k children, whose scores are known anyway.

    More children of the root than the paper's top_k cost nothing and help heads that are often wrong at once.

    The paper verifies 60 nodes on 7-8B models with depth 6 and top_k 10; the defaults here are smaller because a node
    costs more beside a plain step on a CPU.
    """

    def __init__(self, depth: int = 6, top_k: int = 8, num_nodes: int = 32, *, root_factor: int = ROOT_FACTOR) -> None:
        if depth < 1 or top_k < 1 or num_nodes < 2 or root_factor < 1:
            raise ValueError(
                f"got depth={depth}, top_k={top_k}, num_nodes={num_nodes}, root_factor={root_factor}; allowed are at "
                "least 1, 1, 2 and 1"
            )
        self.max_depth = depth
        self.top_k = top_k
        self.root_factor = root_factor
        self.root_top_k = root_factor * top_k
        self.pool_size = self.root_top_k + (depth - 1) * top_k**2  # nodes drafted
        self.num_nodes = min(num_nodes, 1 + self.pool_size)
        self.num_scratch = (depth - 1) * top_k

    @property
    def is_chain(self) -> bool:
        return self.root_top_k == 1

    def contains(self, other: TreePolicy) -> bool:
        if not isinstance(other, DynamicTree) or other.root_factor != self.root_factor:
            return False
        sizes = [(tree.max_depth, tree.top_k, tree.num_nodes) for tree in (other, self)]
        return all(theirs <= mine for theirs, mine in zip(*sizes, strict=True))

    def limit_depth(self, max_depth: int | None) -> DynamicTree:
        if max_depth is None or self.max_depth <= max_depth:
            return self
        return DynamicTree(max_depth, self.top_k, self.num_nodes, root_factor=self.root_factor)

    def grow(
        self,
        drafter: Drafter,
        state: Any,
        root_ids: Tensor,
        draft: DraftLogits,
        sampling: DraftSampling,
        *,
        run: Run = run_eagerly,
    ) -> TokenTree:
        levels = [run(_root_children, draft, sampling.at_depth(0), self.top_k, self.root_factor)]
        for depth in range(1, self.max_depth):
            # One graph serves all levels: weights are packed per graph, and a copy for each level would drive the
            # others out of the processor's caches.
            levels.append(run(expand_level, drafter, state, levels[-1], depth, self.top_k, sampling.at_depth(depth)))
        tree: TokenTree = run(choose_best, root_ids, Pool.of_levels(levels), self.num_nodes)
        tree.max_depth = self.max_depth
        return tree


def _root_children(draft: DraftLogits, sampling: DraftSampling, top_k: int, root_factor: int) -> Children:
    top, ids = sampling.take_best(draft, root_factor * top_k)
    return Children.of_root(top[:, 0], ids[:, 0], top_k, root_factor)


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
    """All drafted nodes of all levels, [B, P] each: parents are indices into the pool (-1: the root), depths those in
    the tree; the rest as in `Children`. A parent stands before its children."""

    token_ids: Tensor
    scores: Tensor
    parents: Tensor
    depths: Tensor
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
        depths = torch.cat([torch.full_like(level.parents, depth) for depth, level in enumerate(levels, start=1)], 1)
        return cls(token_ids, scores, torch.cat(parents, 1), depths, widths)


def choose_best(root_ids: Tensor, pool: Pool, num_nodes: int) -> TokenTree:
    """The tree of the pool's best nodes, with the roots `root_ids` [B].

    A stable sort breaks ties by index, so that a parent always outranks its child, even one of probability 1.

    Args:
        num_nodes: nodes to keep, root included.
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
    return mask_absent(
        TokenTree(
            token_ids=torch.cat([root_ids[:, None], pool.token_ids.gather(1, kept)], dim=1),
            parents=torch.cat([root - 1, kept_parents], dim=1),
            depths=torch.cat([root, pool.depths.gather(1, kept)], dim=1),
            log_probs=torch.cat([root.float(), pool.scores.gather(1, kept)], dim=1),
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
        sampling: of this depth (`DraftSampling.at_depth`).
    """
    draft = drafter.expand(state, level.best_ids, level.best_parents, depth)
    top, ids = sampling.take_best(draft, top_k)
    scores = (level.best_scores[:, :, None] + top).flatten(1)  # [B, W * k]
    batch, width = level.best_ids.shape
    ids = ids.expand(-1, width, -1).flatten(1)
    parents = level.best[:, :, None].expand(-1, -1, top.shape[-1]).flatten(1)
    places, ranks = torch.arange(1, width + 1, device=ids.device), torch.arange(1, top.shape[-1] + 1, device=ids.device)
    needed = torch.maximum(level.widths.gather(1, level.best), places)  # for a node to be in the beam
    widths = torch.maximum(needed[:, :, None], ranks).expand(batch, width, -1).flatten(1)
    best_scores, best = scores.topk(min(top_k, scores.shape[1]), dim=-1)
    return Children(ids, scores, parents, widths, best, ids.gather(1, best), best_scores, best // top.shape[-1])
