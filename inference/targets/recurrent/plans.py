"""How the tokens of one pass reach the recurrent layers: as prompts, or as the levels of a tree.

Legend: B batch, N tokens of a pass, P nodes of a path, W nodes of a level.
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
class Levels:
    """Nodes of trees, read level by level: the rows of a call are the nodes of one level of all trees.

    Worked example, a root with the children 1 and 2, and node 3 below 1:

        nodes      [0]  [1 2]  [3]
        parents    -    [0 0]  [0]      the rows of the level before whose states come before these nodes
        homes      0 1 2 3

    Attributes:
        nodes: per level [B, W] long.
        parents: per level [B * W] long; None where each row continues itself.
        homes: [B, N] long, where each node is among the levels' nodes; None if there are no other nodes.
    """

    nodes: tuple[Tensor, ...]
    parents: tuple[Tensor | None, ...]
    homes: Tensor | None = None

    @classmethod
    def of_paths(cls, nodes: Tensor) -> Levels:
        """The nodes [B, P] of one path in each tree."""
        return cls(nodes.split(1, dim=1), (None,) * nodes.shape[1])

    @classmethod
    def of_parents(cls, rows: Sequence[Sequence[int]], device: torch.device) -> Levels:
        """Trees with these parents. Levels of fewer nodes are padded with their tree's root."""
        trees = [_find_levels(row) for row in rows]
        depth = max(map(len, trees))
        nodes: list[Tensor] = []
        parents: list[Tensor | None] = []
        homes = torch.zeros(len(rows), len(rows[0]), dtype=torch.long)
        num_before, width_before = 0, 1
        for level in range(depth):
            own = [tree[level] if level < len(tree) else [] for tree in trees]
            width = max(map(len, own))
            before = [tree[level - 1] if 0 < level <= len(tree) else [] for tree in trees]
            sources = [
                [number * width_before + above.index(rows[number][node]) if level else number for node in row]
                + [number * width_before] * (width - len(row))
                for number, (row, above) in enumerate(zip(own, before, strict=True))
            ]
            nodes.append(torch.tensor([row + [0] * (width - len(row)) for row in own], device=device))
            parents.append(torch.tensor(sources, device=device).flatten() if level else None)
            for number, row in enumerate(own):
                homes[number, row] = torch.arange(num_before, num_before + len(row))
            num_before, width_before = num_before + width, width
        return cls(tuple(nodes), tuple(parents), homes.to(device))

    def take(self, values: Tensor, level: int) -> Tensor:
        """[B, N, ...] of the nodes as [B * W, 1, ...] of a level."""
        return pick_nodes(values, self.nodes[level]).flatten(0, 1)[:, None]

    def to_nodes(self, levels: Sequence[Tensor]) -> Tensor:
        """[B * W, 1, ...] of each level as [B, N, ...] of the nodes."""
        joined = torch.cat(
            [x.view(len(nodes), -1, *x.shape[2:]) for x, nodes in zip(levels, self.nodes, strict=True)], dim=1
        )
        return joined if self.homes is None else pick_nodes(joined, self.homes)


@dataclass(frozen=True)
class Drafting:
    """Drafts, whose states are not kept.

    Attributes:
        num_tokens: N.
        is_chain: every node of every row is the child of the node before.
        levels: the nodes as mixers read them; None: a chain in one call.
    """

    num_tokens: int
    is_chain: bool
    levels: Levels | None

    @classmethod
    def of_parents(cls, parents: Tensor, *, in_one: bool) -> Drafting:
        """The plan of trees with these parents [B, N], which the host reads. Padding (no parent) is read nowhere.

        Args:
            in_one: chains in one call.
        """
        rows: list[list[int]] = parents.tolist()
        num_tokens, device = parents.shape[1], parents.device
        if all(row == list(range(-1, num_tokens - 1)) for row in rows):
            nodes = torch.arange(num_tokens, device=device).expand(len(rows), -1)
            return cls(num_tokens, True, None if in_one else Levels.of_paths(nodes))
        return cls(num_tokens, False, Levels.of_parents(rows, device))


def pick_nodes(values: Tensor, nodes: Tensor) -> Tensor:
    """[B, N, ...] at nodes [B, M] long of each row: [B, M, ...]."""
    nodes = nodes.to(values.device)
    return values[torch.arange(len(nodes), device=values.device)[:, None], nodes]


def _find_levels(parents: Sequence[int]) -> list[list[int]]:
    """The nodes of every level."""
    levels = [[0]]
    while below := [node for node, parent in enumerate(parents) if parent >= 0 and parent in levels[-1]]:
        levels.append(below)
    return levels
