"""The measured static tree against an exhaustive search."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftsmith.inference import StaticTree
from draftsmith.scripts.build_tree import best_static_tree


def gain(path: tuple[int, ...], accuracy: list[list[float]]) -> float:
    product = 1.0
    for depth, rank in enumerate(path):
        product *= accuracy[depth][rank]
    return product


def test_worked_example() -> None:
    assert best_static_tree([[0.6, 0.2], [0.5, 0.1]], 3) == [[0], [1], [0, 0]]


@pytest.mark.parametrize("num_nodes", [1, 5, 17])
def test_expected_tokens_are_the_most_possible(num_nodes: int) -> None:
    """The best set of nodes is that of the largest gains, whatever the order of the ranks' accuracies."""
    generator = torch.Generator().manual_seed(0)
    accuracy = (torch.rand(3, 4, generator=generator) / 4).tolist()
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)]
    best = sum(sorted((gain(path, accuracy) for path in paths), reverse=True)[:num_nodes])
    tree = best_static_tree(accuracy, num_nodes)
    assert len(tree) == num_nodes
    assert sum(gain(tuple(path), accuracy) for path in tree) == pytest.approx(best)
    assert StaticTree(tree).num_nodes == num_nodes + 1  # every parent is there


@pytest.mark.parametrize("accuracy", [[], [[1.5]]])
def test_refuses_what_is_no_accuracy(accuracy: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        best_static_tree(accuracy, 2)
