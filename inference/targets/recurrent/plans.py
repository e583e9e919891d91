"""How the tokens of one pass reach the recurrent layers: as prompts, or as the paths of a tree.

Legend: B batch, N tokens of a pass, L leaves of a tree, P nodes of its longest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Rows with equally many tokens in a pass.

    Attributes:
        rows: [G] long.
        count: tokens of each of them.
        is_first: nothing comes before these tokens.
    """

    rows: Tensor
    count: int
    is_first: bool


@dataclass(frozen=True)
class Reading:
    """Prompts: the states after the pass are those after each row's real tokens.

    A state would also sum up the padding of shorter rows, so rows of different lengths are calls of their own.
    """

    groups: tuple[Group, ...]
    num_tokens: int

    @classmethod
    def of_counts(cls, counts: Sequence[int], lengths: Sequence[int], num_tokens: int, device: torch.device) -> Reading:
        """Args:
        counts: real tokens of each row; lengths: tokens before them.
        """
        kinds = sorted({(count, length == 0) for count, length in zip(counts, lengths, strict=True) if count})
        groups = []
        for count, is_first in kinds:
            rows = [row for row, own in enumerate(counts) if own == count and (lengths[row] == 0) == is_first]
            groups.append(Group(torch.tensor(rows, device=device), count, is_first))
        return cls(tuple(groups), num_tokens)


@dataclass(frozen=True)
class Drafting:
    """Drafts: every path from the root to a leaf is a row of the recurrent layers' batch.

    Worked example, a root with the children 1 and 2, and node 3 below 1:

        paths    0 2 2      the shorter path is padded with its leaf
                 0 1 3
        homes    0 4 1 5    where each node's own output stands among the paths' L * P places

    Attributes:
        num_rows, num_tokens: B and N.
        paths: [B, L, P] long, node indices; None if all rows are chains, which need no rearrangement.
        homes: [B, N] long; None likewise.
    """

    num_rows: int
    num_tokens: int
    paths: Tensor | None = None
    homes: Tensor | None = None

    @classmethod
    def of_parents(cls, parents: Tensor) -> Drafting:
        """The plan of a tree with these parents [B, N], which the host reads. Padding (no parent) is read nowhere."""
        batch, num_nodes = parents.shape
        rows: list[list[int]] = parents.tolist()
        if all(row == list(range(-1, num_nodes - 1)) for row in rows):
            return cls(batch, num_nodes)
        found = [_find_paths(row) for row in rows]
        width = max(map(len, found))
        depth = max(len(path) for paths in found for path in paths)
        homes = [[0] * num_nodes for _ in rows]
        for paths, home in zip(found, homes, strict=True):
            for number, path in enumerate(paths):
                for place, node in enumerate(path):
                    home[node] = number * depth + place
            for path in paths:
                path += [path[-1]] * (depth - len(path))
            paths += [paths[0]] * (width - len(paths))
        return cls(
            batch, num_nodes, torch.tensor(found, device=parents.device), torch.tensor(homes, device=parents.device)
        )

    @property
    def num_paths(self) -> int:
        """L."""
        return 1 if self.paths is None else self.paths.shape[1]

    @property
    def length(self) -> int:
        """P."""
        return self.num_tokens if self.paths is None else self.paths.shape[2]

    def to_paths(self, values: Tensor) -> Tensor:
        """[B, N, ...] of the nodes as [B * L, P, ...] of the paths."""
        if self.paths is None:
            return values
        return pick_nodes(values, self.paths.flatten(1)).unflatten(1, self.paths.shape[1:]).flatten(0, 1)

    def to_nodes(self, values: Tensor) -> Tensor:
        """[B * L, P, ...] of the paths as [B, N, ...] of the nodes."""
        if self.homes is None:
            return values
        return pick_nodes(values.unflatten(0, (self.num_rows, -1)).flatten(1, 2), self.homes)

    def list_rows(self, device: torch.device) -> Tensor:
        """[B * L] long, the row of each path."""
        return torch.arange(self.num_rows, device=device).repeat_interleave(self.num_paths)


def pick_nodes(values: Tensor, nodes: Tensor) -> Tensor:
    """[B, N, ...] at nodes [B, M] long of each row: [B, M, ...]."""
    nodes = nodes.to(values.device)
    return values[torch.arange(len(nodes), device=values.device)[:, None], nodes]


def _find_paths(parents: Sequence[int]) -> list[list[int]]:
    """The paths from the root to every leaf."""
    children = [node for node, parent in enumerate(parents) if parent >= 0]
    inner = {parents[node] for node in children}
    paths = []
    for leaf in [node for node in children if node not in inner] or [0]:
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths
