"""How the tokens of one pass reach the recurrent layers: as prompts, or as the levels of a tree.

Legend: B batch, N tokens of a pass, P nodes of a path, W nodes of a level.
"""

from __future__ import annotations

import itertools
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


def group_rows(counts: Sequence[int], lengths: Sequence[int], device: torch.device) -> list[Group]:
    """The plan of prompts: the states after the pass are those after each row's real tokens.

    A state would also sum up the padding of shorter rows, so rows of different lengths are calls of their own.

    Args:
        counts: real tokens of each row; lengths: tokens before them.
    """
    groups = []
    for count, is_first in sorted(
        {(count, length == 0) for count, length in zip(counts, lengths, strict=True) if count}
    ):
        rows = [row for row, own in enumerate(counts) if own == count and (lengths[row] == 0) == is_first]
        groups.append(Group(torch.tensor(rows, device=device), count, is_first))
    return groups


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

    @property
    def is_chain(self) -> bool:
        """Whether every node of every tree is the child of the node before."""
        return self.homes is None

    @classmethod
    def of_paths(cls, nodes: Tensor) -> Levels:
        """The nodes [B, P] of one path in each tree."""
        return cls(nodes.split(1, dim=1), (None,) * nodes.shape[1])

    @classmethod
    def of_parents(cls, parents: Tensor) -> Levels:
        """Trees with these parents [B, N], which the host reads. Padding (no parent) is read nowhere, and levels of
        fewer nodes are padded with their tree's root."""
        rows: list[list[int]] = parents.tolist()
        num_nodes, device = parents.shape[1], parents.device
        if all(row == list(range(-1, num_nodes - 1)) for row in rows):
            return cls.of_paths(torch.arange(num_nodes, device=device).expand(len(rows), -1))
        nodes: list[Tensor] = []
        above: list[Tensor | None] = []
        places, homes = ([[0] * num_nodes for _ in rows] for _ in range(2))  # in the node's own level, and in all
        num_before, width_before = 0, 1
        for level in itertools.zip_longest(*map(_find_levels, rows), fillvalue=[]):
            width = max(map(len, level))
            padded = [own + [0] * (width - len(own)) for own in level]
            sources = [
                [number * width_before + places[number][max(rows[number][node], 0)] for node in own]
                for number, own in enumerate(padded)
            ]
            above.append(torch.tensor(sources, device=device).flatten() if nodes else None)
            nodes.append(torch.tensor(padded, device=device))
            for number, own in enumerate(level):
                for place, node in enumerate(own):
                    places[number][node], homes[number][node] = place, num_before + place
            num_before, width_before = num_before + width, width
        return cls(tuple(nodes), tuple(above), torch.tensor(homes, device=device))

    def take(self, values: Tensor, level: int) -> Tensor:
        """[B, N, ...] of the nodes as [B * W, 1, ...] of a level."""
        return pick_nodes(values, self.nodes[level]).flatten(0, 1)[:, None]

    def to_nodes(self, levels: Sequence[Tensor]) -> Tensor:
        """[B * W, 1, ...] of each level as [B, N, ...] of the nodes."""
        joined = torch.cat(
            [x.view(len(nodes), -1, *x.shape[2:]) for x, nodes in zip(levels, self.nodes, strict=True)], dim=1
        )
        return joined if self.homes is None else pick_nodes(joined, self.homes)


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
