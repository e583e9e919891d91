"""DynamicTree: EAGLE-2's trees, whose shape follows the drafter's scores, and the beam they are grown with.

Legend: B batch, W nodes of a level's beam, M nodes of the level.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.sampling import DraftSampling
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.token_tree import TokenTree, mask_absent

# The root has up to this many times as many children as a beam is wide: their scores are known anyway.
ROOT_FACTOR = 2


@dataclass(frozen=True)
class Level:
    """All drafted nodes of one depth, M of them.

    Attributes:
        token_ids: [B, M] int64.
        scores: [B, M] float32, log-scores of their paths.
        parents: [B, M] int64, indices into the level above; -1 for the root.
        num_siblings: children that each node of the beam above got; a node's place // num_siblings is its parent's
            place in that beam.
    """

    token_ids: Tensor
    scores: Tensor
    parents: Tensor
    num_siblings: int

    @classmethod
    def of_root(cls, root_ids: Tensor) -> Level:
        """The level of the roots [B]."""
        zeros = torch.zeros_like(root_ids)[:, None]
        return cls(root_ids[:, None], zeros.float(), zeros - 1, 1)


def add_root_children(root: Level, draft: DraftLogits, sampling: DraftSampling, top_k: int, root_factor: int) -> Level:
    top, ids = sampling.take_best(draft, root_factor * top_k)
    return add_children(root.parents + 1, root.scores, top, ids)


def expand_level(drafter: Drafter, state: Any, level: Level, depth: int, top_k: int, sampling: DraftSampling) -> Level:
    """The children of a level's `top_k` best nodes, which are its beam.

    Args:
        depth: of the level.
        sampling: of this depth (`DraftSampling.at_depth`).
    """
    best_scores, best = level.scores.topk(min(top_k, level.scores.shape[1]), dim=-1)
    draft = drafter.expand(state, level.token_ids.gather(1, best), best // level.num_siblings, depth)
    top, ids = sampling.take_best(draft, top_k)
    return add_children(best, best_scores, top, ids)


def add_children(beam: Tensor, beam_scores: Tensor, top: Tensor, ids: Tensor) -> Level:
    """The next level.

    Args:
        beam: [B, W] int64, nodes of the level above, best first; beam_scores: [B, W] float32.
        top, ids: scores and token ids of their k children, [B, W or 1, k], as from `DraftSampling.take_best`.
    """
    width, num_siblings = beam.shape[1], top.shape[-1]
    return Level(
        token_ids=ids.expand(-1, width, -1).flatten(1),
        scores=(beam_scores[:, :, None] + top).flatten(1),
        parents=beam[:, :, None].expand(-1, -1, num_siblings).flatten(1),
        num_siblings=num_siblings,
    )


def choose_nodes(levels: Sequence[Level], num_nodes: int) -> TokenTree:
    return keep_best(join_levels(levels), num_nodes)


def join_levels(levels: Sequence[Level]) -> TokenTree:
    """The tree of all drafted nodes, root included."""
    columns: tuple[list[Tensor], ...] = ([], [], [], [])
    above = own = 0  # where the level above each level begins, and the level itself
    for depth, level in enumerate(levels):
        tensors = level.token_ids, level.parents + above, torch.full_like(level.parents, depth), level.scores
        for column, tensor in zip(columns, tensors, strict=True):
            column.append(tensor)
        above, own = own, own + level.token_ids.shape[1]
    token_ids, parents, depths, scores = map(functools.partial(torch.cat, dim=1), columns)
    return TokenTree(token_ids, parents, depths, scores)


def keep_best(tree: TokenTree, num_nodes: int) -> TokenTree:
    """The tree of the best nodes, `num_nodes` of them with the root.

    A stable sort breaks ties by index, so that a parent always outranks its child, even one of probability 1.
    """
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
        )
    )


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

    level_functions = ("add_root_children", "expand_level", "choose_nodes")
    add_root_children = staticmethod(add_root_children)
    # One function for all levels: a runner may pack the weights for it, and a copy for each level would drive the
    # others out of the processor's caches.
    expand_level = staticmethod(expand_level)
    choose_nodes = staticmethod(choose_nodes)

    @property
    def is_chain(self) -> bool:
        return self.root_factor * self.top_k == 1

    def contains(self, other: DynamicTree) -> bool:
        is_alike = (other.top_k, other.root_factor) == (self.top_k, self.root_factor)
        return is_alike and other.max_depth <= self.max_depth and other.num_nodes <= self.num_nodes

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
    ) -> TokenTree:
        root = Level.of_root(root_ids)
        levels = [root, self.add_root_children(root, draft, sampling.at_depth(0), self.top_k, self.root_factor)]
        for depth in range(1, self.max_depth):
            levels.append(self.expand_level(drafter, state, levels[-1], depth, self.top_k, sampling.at_depth(depth)))
        tree = self.choose_nodes(levels, self.num_nodes)
        tree.max_depth = self.max_depth
        return tree
