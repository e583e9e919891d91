"""StaticTree: the same shape at every step, and chains.

Legend: B batch, M nodes of one depth, W of them with children (the frontier), V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.sampling import DraftSampling
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.token_tree import DrawnFrom, TokenTree, mask_absent


@dataclass(frozen=True)
class _Nodes:
    """The M nodes of one depth: token_ids [B, M] int64, log_probs [B, M] float32 of their paths; log_q [B, W, V]
    float32 at the nodes above that have children, when drafts are drawn at random."""

    token_ids: Tensor
    log_probs: Tensor
    log_q: Tensor | None = None


@dataclass(frozen=True)
class _Level:
    """How the nodes of depth d + 1 are drafted. All int64; indices within a level count that level's nodes.

    frontier: [W] which nodes of depth d have children. frontier_parents: [1, W] their parents as indices into the
    frontier before. child_frontier, child_ranks: [nodes of depth d + 1] each child's frontier node and candidate rank.
    """

    frontier: Tensor
    frontier_parents: Tensor
    child_frontier: Tensor
    child_ranks: Tensor
    num_ranks: int


@dataclass(frozen=True)
class _StaticPlan:
    """A tree's shape as index tensors on one device. parents, depths: [1, N]; draft_rows, num_ranks: as in `DrawnFrom`.

    Worked example, the paths of `order_paths`, which are the shape of TokenTree's example:

        node              0   1   2   3   4
        parents          -1   0   0   1   1
        depths            0   1   1   2   2

        level               1            2
        frontier            0            0      node 1, the first of its level, has children
        child_frontier      0   0        0   0
        child_ranks         0   1        0   1
    """

    levels: list[_Level]
    parents: Tensor
    depths: Tensor
    draft_rows: Tensor
    num_ranks: int

    @classmethod
    def build(cls, paths: Sequence[tuple[int, ...]], device: torch.device) -> _StaticPlan:
        def tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        levels: list[_Level] = []
        root: list[tuple[int, ...]] = [()]
        above, before = root, root  # the nodes of the level above, and those of the one before it that have children
        drafted_from: list[tuple[int, ...]] = []
        for depth in range(1, 1 + len(paths[-1])):
            nodes = [path for path in paths if len(path) == depth]
            frontier = sorted({path[:-1] for path in nodes})
            ranks = [path[-1] for path in nodes]
            levels.append(
                _Level(
                    frontier=tensor([above.index(path) for path in frontier]),
                    frontier_parents=tensor([before.index(path[:-1]) for path in frontier])[None],
                    child_frontier=tensor([frontier.index(path[:-1]) for path in nodes]),
                    child_ranks=tensor(ranks),
                    num_ranks=max(ranks) + 1,
                )
            )
            drafted_from += frontier
            above, before = nodes, frontier
        parents = tensor([-1, *(paths.index(path[:-1]) for path in paths[1:])])
        depths = tensor([len(path) for path in paths])
        rows = tensor([drafted_from.index(path) if path in drafted_from else 0 for path in paths])
        return cls(levels, parents[None], depths[None], rows, max(level.num_ranks for level in levels))


def draft_ranks(
    drafter: Drafter, state: Any, above: _Nodes, level: _Level, depth: int, sampling: DraftSampling
) -> _Nodes:
    """Scores the children of one depth's frontier, and takes the tree's."""
    frontier_ids = above.token_ids[:, level.frontier]
    parents = level.frontier_parents.expand(frontier_ids.shape[0], -1)
    return take_ranks(drafter.expand(state, frontier_ids, parents, depth), above, level, depth, sampling)


def take_ranks(draft: DraftLogits, above: _Nodes, level: _Level, depth: int, sampling: DraftSampling) -> _Nodes:
    """The candidates of the ranks that the tree has at this depth, from the scores of their parents' children."""
    log_q = None
    if sampling.seeds is None:
        top, ids = sampling.take_best(draft, level.num_ranks)
    else:
        top, ids, log_q = sampling.draw(draft, depth, level.num_ranks, level.frontier.numel())
    missing = level.num_ranks - top.shape[-1]
    if missing > 0:  # the drafter has fewer candidates than the tree has ranks
        top = torch.nn.functional.pad(top, (0, missing), value=float("-inf"))
        ids = torch.nn.functional.pad(ids, (0, missing))
    which = level.child_frontier if top.shape[1] > 1 else torch.zeros_like(level.child_frontier)
    log_probs = above.log_probs[:, level.frontier[level.child_frontier]] + top[:, which, level.child_ranks]
    return _Nodes(ids[:, which, level.child_ranks], log_probs, log_q)


class StaticTree(TreePolicy):
    """A fixed shape (Medusa, arXiv 2401.10774, section 2.1.2): node [0, 2] is the third-best child of the best child.

    Args:
        paths: one rank path for each node, as in `order_paths`.

    Attributes:
        paths: as `order_paths` returns them.
    """

    has_fixed_shape = True
    level_functions = ("take_ranks", "draft_ranks")
    take_ranks = staticmethod(take_ranks)
    draft_ranks = staticmethod(draft_ranks)

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        self.paths = order_paths(paths)
        self.max_depth = len(self.paths[-1])
        self.num_nodes = len(self.paths)
        if self.num_nodes < 2:
            raise ValueError("a static tree needs at least one path, such as [[0]]")
        self.num_scratch = len({path[:-1] for path in self.paths if len(path) > 1})
        known = set(self.paths)
        self.skips_ranks = any((*path[:-1], path[-1] - 1) not in known for path in known if path and path[-1])
        self._plans: dict[torch.device, _StaticPlan] = {}

    @classmethod
    def from_file(cls, path: str | Path) -> StaticTree:
        """Reads `paths: [[0], [0, 0], [1], ...]` from a YAML file (see configs/trees)."""
        import yaml

        content = yaml.safe_load(Path(path).read_text())
        if not isinstance(content, dict) or set(content) != {"paths"}:
            raise ValueError(
                f"{path}: a tree file holds one key `paths`, a list of rank paths such as [[0], [0, 0], [1]]"
            )
        return cls(content["paths"])

    @property
    def is_chain(self) -> bool:
        return self.num_nodes == self.max_depth + 1

    def grow(
        self,
        drafter: Drafter,
        state: Any,
        root_ids: Tensor,
        draft: DraftLogits,
        sampling: DraftSampling,
    ) -> TokenTree:
        batch, device = root_ids.shape[0], root_ids.device
        if device not in self._plans:
            self._plans[device] = _StaticPlan.build(self.paths, device)
        plan = self._plans[device]
        levels = [_Nodes(root_ids[:, None], torch.zeros(batch, 1, device=device))]
        for depth, level in enumerate(plan.levels):
            here = sampling.at_depth(depth)
            if depth == 0:
                levels.append(self.take_ranks(draft, levels[-1], level, depth, here))
            else:
                levels.append(self.draft_ranks(drafter, state, levels[-1], level, depth, here))
        drawn_from = [level.log_q for level in levels if level.log_q is not None]
        drawn = DrawnFrom(torch.cat(drawn_from, dim=1), plan.draft_rows, plan.num_ranks) if drawn_from else None
        return mask_absent(
            TokenTree(
                torch.cat([level.token_ids for level in levels], dim=1),
                plan.parents.expand(batch, -1),
                plan.depths.expand(batch, -1),
                torch.cat([level.log_probs for level in levels], dim=1),
                max_depth=self.max_depth,
                drawn=drawn,
            )
        )


def chain(depth: int) -> StaticTree:
    """The best token, and the best after it, `depth` times."""
    if depth < 1:
        raise ValueError(f"a chain has a depth of at least 1, got {depth}")
    return StaticTree([[0] * (length + 1) for length in range(depth)])


def order_paths(paths: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The rank paths of a tree's nodes, the root's () in front, by depth and then by path, so that levels are
    contiguous.

    Worked example:

        [[1], [0], [0, 1], [0, 0]]  ->  (), (0,), (1,), (0, 0), (0, 1)

    Args:
        paths: one list of ranks per node, root left out: [1] is the root's second-best candidate, [1, 0] that node's
            best one.

    Raises:
        ValueError: no lists of ranks, an empty path (the root is implied), a rank below 0 or no integer, a node named
            twice, or a node whose parent is missing.
    """
    try:
        every = [tuple(path) for path in paths]
    except TypeError:
        raise ValueError(
            f"got the tree {paths!r}: a static tree is a list of rank paths, such as [[0], [0, 0], [1]]; other trees "
            "have names, such as 'chain:4'"
        ) from None
    nodes: set[tuple[int, ...]] = {()}
    for ranks in every:
        if not ranks:
            raise ValueError("an empty path stands for the root, which every tree has: leave it out")
        if any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in ranks):
            raise ValueError(f"path {list(ranks)}: ranks are integers from 0 (the best candidate) upwards")
        if ranks in nodes:
            raise ValueError(f"path {list(ranks)} stands twice in the tree: leave one out")
        nodes.add(ranks)
    for ranks in nodes - {()}:
        if ranks[:-1] not in nodes:
            raise ValueError(f"path {list(ranks)} has no parent: add {list(ranks[:-1])}")
    return tuple(sorted(nodes, key=lambda path: (len(path), path)))
