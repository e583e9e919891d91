"""What decoders keep of their trees: which branches were accepted, and not merely offered.

Legend: B batch, N tree nodes, P path length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import Tensor

from draftsmith.inference.step import Step, StepOutput
from draftsmith.inference.trees.token_tree import TokenTree


@dataclass
class Commits:
    """paths: of each accepted drafted node, the ranks from the root to it (as in `StaticTree`), where a rank counts
    the siblings of the tree that the drafter finds likelier; num_moved: rows' steps whose accepted nodes did not stand
    in the first slots of the tree, so that keys and values were moved."""

    paths: set[tuple[int, ...]] = field(default_factory=set)
    num_moved: int = 0

    def add(self, tree: TokenTree, path: Tensor, counts: Tensor) -> None:
        """Notes the first counts[b] nodes of `path` [B, P], root first."""
        parents, scores = tree.parents.tolist(), tree.log_probs.tolist()
        for row, (nodes, count) in enumerate(zip(path.tolist(), counts.tolist(), strict=True)):
            ranks: list[int] = []
            for node in nodes[1:count]:
                siblings = [other for other, parent in enumerate(parents[row]) if parent == parents[row][node]]
                ranks.append(sum(scores[row][other] > scores[row][node] for other in siblings))
                self.paths.add(tuple(ranks))
            self.num_moved += nodes[:count] != list(range(count))


@contextmanager
def watch_commits(commits: Commits) -> Iterator[None]:
    """Inside the block, every step of every decoder is noted in `commits`."""
    plain = Step.__call__

    def call(step: Step, *args: Any, **kwargs: Any) -> StepOutput:
        output = plain(step, *args, **kwargs)
        path = output.accepted.path
        commits.add(output.tree, path, output.emitted[:, path.shape[1]])
        return output

    with patch.object(Step, "__call__", call):
        yield
