"""DynamicTree: EAGLE-2's trees, whose shape follows the drafter's scores, and the beam they are grown with.

Legend: B batch, W nodes of a level's beam, M nodes of the level.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.sampling import DraftSampling
from draftsmith.inference.trees.policy import Run, TreePolicy, mask_absent, run_eagerly
from draftsmith.inference.trees.token_tree import TokenTree

# The root has up to this many times as many children as a beam is wide: their scores are known anyway.
ROOT_FACTOR = 2


class DynamicTree(TreePolicy):
    """EAGLE-2 (arXiv 2406.16858, section 4): per level the `top_k` most likely nodes are expanded into `top_k` children
    each; all drafted nodes are then re-ranked and the best are verified.

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
        self.num_nodes = min(num_nodes, 1 + root_factor * top_k + (depth - 1) * top_k**2)  # no more than are drafted
        self.num_scratch = (depth - 1) * top_k

    @property
    def is_chain(self) -> bool:
        return self.root_factor * self.top_k == 1

    def contains(self, other: TreePolicy) -> bool:
        if not isinstance(other, DynamicTree) or (other.top_k, other.root_factor) != (self.top_k, self.root_factor):
            return False
        return other.max_depth <= self.max_depth and other.num_nodes <= self.num_nodes

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
        root = Level.of_root(root_ids)
        levels = [root, run(_add_root_children, root, draft, sampling.at_depth(0), self.top_k, self.root_factor)]
        for depth in range(1, self.max_depth):
            # One graph serves all levels: weights are packed per graph, and a copy for each level would drive the
            # others out of the processor's caches.
            levels.append(run(expand_level, drafter, state, levels[-1], depth, self.top_k, sampling.at_depth(depth)))
        tree: TokenTree = run(_choose_nodes, levels, self.num_nodes)
        tree.max_depth = self.max_depth
        return tree


@dataclass(frozen=True)
class Level:
    """All drafted nodes of one depth, M of them.

    Attributes:
        token_ids: [B, M] int64.
        scores: [B, M] float32, log-scores of their paths.
        parents: [B, M] int64, indices into the level above; -1 for the root.
        widths: [B, M] int64, as in `TokenTree`.
        num_siblings: children that each node of the beam above got; a node's place // num_siblings is its parent's
            place in that beam.
    """

    token_ids: Tensor
    scores: Tensor
    parents: Tensor
    widths: Tensor
    num_siblings: int

    @classmethod
    def of_root(cls, root_ids: Tensor) -> Level:
        """The level of the roots [B]."""
        zeros = torch.zeros_like(root_ids)[:, None]
        return cls(root_ids[:, None], zeros.float(), zeros - 1, zeros, 1)


def _add_root_children(root: Level, draft: DraftLogits, sampling: DraftSampling, top_k: int, root_factor: int) -> Level:
    top, ids = sampling.take_best(draft, root_factor * top_k)
    ranks = torch.arange(top.shape[-1], device=top.device)
    return add_children(root, root.widths, root.scores, top, ids, ranks // root_factor + 1)


def expand_level(drafter: Drafter, state: Any, level: Level, depth: int, top_k: int, sampling: DraftSampling) -> Level:
    """The children of a level's `top_k` best nodes, which are its beam.

    Args:
        depth: of the level.
        sampling: of this depth (`DraftSampling.at_depth`).
    """
    best_scores, best = level.scores.topk(min(top_k, level.scores.shape[1]), dim=-1)
    draft = drafter.expand(state, level.token_ids.gather(1, best), best // level.num_siblings, depth)
    top, ids = sampling.take_best(draft, top_k)
    return add_children(level, best, best_scores, top, ids, torch.arange(1, top.shape[-1] + 1, device=top.device))


def add_children(
    level: Level, beam: Tensor, beam_scores: Tensor, top: Tensor, ids: Tensor, child_widths: Tensor
) -> Level:
    """The next level.

    Args:
        beam: [B, W] int64, nodes of the level, best first; beam_scores: [B, W] float32.
        top, ids: scores and token ids of their k children, [B, W or 1, k], as from `DraftSampling.take_best`.
        child_widths: [k] int64, the narrowest beam that drafts a node's child of this rank.
    """
    width, num_siblings = beam.shape[1], top.shape[-1]
    places = torch.arange(1, width + 1, device=beam.device)
    needed = torch.maximum(level.widths.gather(1, beam), places)  # for a node to be in the beam
    return Level(
        token_ids=ids.expand(-1, width, -1).flatten(1),
        scores=(beam_scores[:, :, None] + top).flatten(1),
        parents=beam[:, :, None].expand(-1, -1, num_siblings).flatten(1),
        widths=torch.maximum(needed[:, :, None], child_widths).flatten(1),
        num_siblings=num_siblings,
    )


def _choose_nodes(levels: Sequence[Level], num_nodes: int) -> TokenTree:
    return keep_best(join_levels(levels), num_nodes)


def join_levels(levels: Sequence[Level]) -> TokenTree:
    """The tree of all drafted nodes, root included."""
    sizes = [level.token_ids.shape[1] for level in levels]
    starts = [0, 0, *itertools.accumulate(sizes[:-2])]  # of the level above each level
    token_ids, scores, widths = (
        torch.cat([getattr(level, name) for level in levels], 1) for name in ("token_ids", "scores", "widths")
    )
    parents = torch.cat([level.parents + start for level, start in zip(levels, starts, strict=True)], 1)
    depths = torch.cat([torch.full_like(level.parents, depth) for depth, level in enumerate(levels)], 1)
    return TokenTree(token_ids, parents, depths, scores, widths=widths)


def keep_best(tree: TokenTree, num_nodes: int) -> TokenTree:
    """The tree of the best nodes, `num_nodes` of them with the root.

    A stable sort breaks ties by index, so that a parent always outranks its child, even one of probability 1.
    """
    assert tree.widths is not None
    batch, num_drafted = tree.token_ids.shape
    kept = tree.log_probs.sort(dim=-1, descending=True, stable=True).indices[:, :num_nodes].sort(dim=-1).values
    # Each node's place in the new tree; the last entry is the place of the root's parent, -1.
    places = torch.full((batch, num_drafted + 1), -1, device=kept.device)
    places.scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand(batch, -1))
    return mask_absent(
        TokenTree(
            token_ids=tree.token_ids.gather(1, kept),
            parents=places.gather(1, tree.parents.gather(1, kept) % (num_drafted + 1)),
            depths=tree.depths.gather(1, kept),
            log_probs=tree.log_probs.gather(1, kept),
            widths=tree.widths.gather(1, kept),
        )
    )
