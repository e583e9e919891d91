"""Tree policies: which of a drafter's candidates become nodes of the tree that the target verifies.

Legend: B batch, N tree nodes (root included), W frontier nodes of one level, C candidate columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference.drafters.base import Drafter, DraftLogits
from inference.drafters.sampling import DraftSampling
from inference.trees.beam import ROOT_FACTOR, Children, Pool, choose_best, expand_level, mask_absent, top_candidates
from inference.trees.token_tree import DrawnFrom, TokenTree, Topology, paths_to_topology


class TreePolicy(ABC):
    """Grows one tree a step.

    Attributes:
        max_depth: deepest level it can reach.
        num_nodes: nodes of its trees, root included.
        num_scratch: frontier nodes (nodes whose children are scored by `expand`) of all levels together.
    """

    max_depth: int
    num_nodes: int
    num_scratch: int

    @property
    def is_chain(self) -> bool:
        """Whether node i is always the child of node i - 1."""
        return False

    @property
    def is_narrow(self) -> bool:
        """Whether no level has more than one node whose children are drafted."""
        return self.num_scratch < self.max_depth

    @abstractmethod
    def grow(
        self, drafter: Drafter, state: Any, root_ids: Tensor, draft: DraftLogits, sampling: DraftSampling
    ) -> TokenTree:
        """Builds the tree.

        Args:
            root_ids: [B] the last accepted tokens.
            draft: scores of the root's children, as `drafter.extend` returned them.
            sampling: how scores become candidates.
        """

    def limit_depth(self, max_depth: int | None) -> TreePolicy:
        """This policy for a drafter that proposes at most `max_depth` levels.

        Raises:
            ValueError: when its shape asks for more levels.
        """
        if max_depth is not None and self.max_depth > max_depth:
            raise ValueError(
                f"the tree is {self.max_depth} levels deep, the drafter proposes at most {max_depth}: "
                "use a shallower tree, or heads with more levels"
            )
        return self


class StaticTree(TreePolicy):
    """A fixed shape (Medusa, arXiv 2401.10774, section 2.1.2): node [0, 2] is the third-best child of the best child.

    Args:
        paths: rank paths; every proper prefix of a path must be there too (see `paths_to_topology`).
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        self.topology = paths_to_topology(paths)
        self.max_depth = self.topology.max_depth
        self.num_nodes = self.topology.num_nodes
        if self.num_nodes < 2:
            raise ValueError("a static tree needs at least one path, such as [[0]]")
        self.num_scratch = sum(len(set(parents)) for parents in self._level_parents()[1:])
        self._plans: dict[torch.device, _StaticPlan] = {}

    def _level_parents(self) -> list[list[int]]:
        """For each depth from 1 on, the parent of each of its nodes."""
        return [[self.topology.parents[node] for node in level] for level in self.topology.levels[1:]]

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

    @property
    def skips_ranks(self) -> bool:
        """Whether some node stands there without its better siblings."""
        paths = set(self.topology.paths)
        return any((*path[:-1], path[-1] - 1) not in paths for path in paths if path and path[-1])

    def grow(
        self, drafter: Drafter, state: Any, root_ids: Tensor, draft: DraftLogits, sampling: DraftSampling
    ) -> TokenTree:
        batch, device = root_ids.shape[0], root_ids.device
        if device not in self._plans:
            self._plans[device] = _StaticPlan.build(self.topology, device)
        plan = self._plans[device]
        token_ids, log_probs = [root_ids[:, None]], [torch.zeros(batch, 1, device=device)]
        drawn_from: list[Tensor] = []
        for depth, level in enumerate(plan.levels):
            if depth > 0:
                parents = level.frontier_parents.expand(batch, -1)
                draft = drafter.expand(state, token_ids[-1][:, level.frontier], parents, depth)
            if sampling.draws is None:
                top, ids = top_candidates(draft, sampling, depth, level.num_ranks)
            else:
                top, ids, log_q = sampling.draws.draw(draft, depth, level.num_ranks, level.frontier.numel())
                drawn_from.append(log_q)
            missing = level.num_ranks - top.shape[-1]
            if missing > 0:  # the drafter has fewer candidates than the tree has ranks
                top = torch.nn.functional.pad(top, (0, missing), value=float("-inf"))
                ids = torch.nn.functional.pad(ids, (0, missing))
            which = level.child_frontier if top.shape[1] > 1 else torch.zeros_like(level.child_frontier)
            above = log_probs[-1][:, level.frontier[level.child_frontier]]
            log_probs.append(above + top[:, which, level.child_ranks])
            token_ids.append(ids[:, which, level.child_ranks])
        drawn = None
        if drawn_from:
            drawn = DrawnFrom(torch.cat(drawn_from, dim=1), plan.draft_rows, plan.num_ranks)
        return mask_absent(
            TokenTree(
                torch.cat(token_ids, dim=1),
                plan.parents.expand(batch, -1),
                plan.depths.expand(batch, -1),
                torch.cat(log_probs, dim=1),
                max_depth=self.max_depth,
                drawn=drawn,
            )
        )


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
    """A topology as index tensors on one device. parents, depths: [1, N]; draft_rows: [N], which of all frontier nodes
    a node is (0 for those without children); num_ranks: as in `Topology`, which the compiler cannot ask."""

    levels: list[_Level]
    parents: Tensor
    depths: Tensor
    draft_rows: Tensor
    num_ranks: int

    @classmethod
    def build(cls, topology: Topology, device: torch.device) -> _StaticPlan:
        def tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        levels, before = [], [0]
        draft_rows, num_rows = [0] * topology.num_nodes, 0
        for nodes, children in zip(topology.levels[:-1], topology.levels[1:], strict=True):
            frontier = sorted({topology.parents[child] for child in children})
            for node in frontier:
                draft_rows[node], num_rows = num_rows, num_rows + 1
            ranks = [topology.ranks[child] for child in children]
            levels.append(
                _Level(
                    frontier=tensor([node - nodes[0] for node in frontier]),
                    frontier_parents=tensor([before.index(max(topology.parents[node], 0)) for node in frontier])[None],
                    child_frontier=tensor([frontier.index(topology.parents[child]) for child in children]),
                    child_ranks=tensor(ranks),
                    num_ranks=max(ranks) + 1,
                )
            )
            before = frontier
        parents, depths = tensor(topology.parents)[None], tensor(topology.depths)[None]
        return cls(levels, parents, depths, tensor(draft_rows), topology.num_ranks)


def chain(depth: int) -> StaticTree:
    """The best token, and the best after it, `depth` times."""
    if depth < 1:
        raise ValueError(f"a chain has a depth of at least 1, got {depth}")
    return StaticTree([[0] * (length + 1) for length in range(depth)])


class DynamicTree(TreePolicy):
    """EAGLE-2 (arXiv 2406.16858, section 4): per level the `top_k` most likely nodes are expanded into `top_k` children
    each; the whole pool is then re-ranked and the best nodes are verified.

    Args:
        depth: levels of the tree.
        top_k: beam width and children per node.
        num_nodes: nodes verified, root included.
        root_factor: the root has up to so many times as many children, whose scores are known anyway.

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

    def limit_depth(self, max_depth: int | None) -> TreePolicy:
        if max_depth is None or self.max_depth <= max_depth:
            return self
        return DynamicTree(max_depth, self.top_k, self.num_nodes, root_factor=self.root_factor)

    def grow(
        self, drafter: Drafter, state: Any, root_ids: Tensor, draft: DraftLogits, sampling: DraftSampling
    ) -> TokenTree:
        top, ids = top_candidates(draft, sampling, 0, self.root_top_k)

        def expand(level: Children, depth: int) -> Children:
            here = replace(sampling, noise=None if sampling.noise is None else sampling.noise[:, depth : depth + 1])
            return expand_level(drafter, state, level, depth, self.top_k, here)

        levels = self.grow_levels(Children.of_root(top[:, 0], ids[:, 0], self.top_k, self.root_factor), expand)
        return choose_best(root_ids, Pool.of_levels(levels), self.num_nodes, self.max_depth)

    def grow_levels(self, first: Children, expand: Callable[[Children, int], Children]) -> list[Children]:
        """All levels behind the root's children; `expand` takes a level and its depth, and returns the next one."""
        levels = [first]
        for depth in range(1, self.max_depth):
            levels.append(expand(levels[-1], depth))
        return levels


def resolve_policy(tree: TreePolicy | str | Path | Sequence[Sequence[int]] | None, max_depth: int | None) -> TreePolicy:
    """A policy from what users write: a policy; "dynamic" (the default), "auto", "chain", "gamma"; a file; rank paths.

    Raises:
        ValueError: for anything else, and for trees deeper than the drafter goes.
    """
    if tree is None or tree == "dynamic":
        return DynamicTree().limit_depth(max_depth)
    if tree == "auto":
        from inference.planning.auto_tree import AutoTree

        return AutoTree().limit_depth(max_depth)
    if tree == "gamma":
        from inference.planning.gamma import gamma_chain

        return gamma_chain().limit_depth(max_depth)
    if tree == "chain":
        return chain(min(5, max_depth or 5))
    if isinstance(tree, TreePolicy):
        return tree.limit_depth(max_depth)
    if isinstance(tree, (str, Path)):
        if not Path(tree).is_file():
            raise ValueError(
                f"tree is {str(tree)!r}; allowed are 'dynamic', 'auto', 'chain', 'gamma', a tree file such as "
                "configs/trees/NAME.yaml, a list of rank paths, or a TreePolicy"
            )
        return StaticTree.from_file(tree).limit_depth(max_depth)
    return StaticTree(tree).limit_depth(max_depth)
