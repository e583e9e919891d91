"""The static tree that is expected to accept most, from how often each candidate is right.

Medusa, arXiv 2401.10774, section 2.3.3.

Legend: K depths, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence


def best_static_tree(accuracy: Sequence[Sequence[float]], num_nodes: int) -> list[list[int]]:
    """The nodes that raise the expected number of accepted tokens most.

    A node's gain is the product of the accuracies along its path. A child never gains more than its parent, so the best
    nodes are a tree.

    Worked example: two depths of accuracies [0.6, 0.2] and [0.5, 0.1], three nodes:

        [0] gains 0.6, [0, 0] gains 0.3, [1] gains 0.2

    Args:
        accuracy: [K][R] how often the candidate of rank r (0 = best) at depth d + 1 is the target's token, given that
            its parent was.
        num_nodes: drafted nodes of the tree, the root left out.

    Returns:
        rank paths, as `StaticTree` takes them, shortest first; fewer than `num_nodes` when there are no more.

    Raises:
        ValueError: accuracies outside 0 to 1, none at all, or no nodes asked for.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes is {num_nodes}; a tree drafts at least 1 node")
    if not accuracy or not all(accuracy) or any(not 0 <= value <= 1 for row in accuracy for value in row):
        raise ValueError("accuracy must hold at least one depth and one rank, each value from 0 to 1")
    level: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    drafted: list[tuple[tuple[int, ...], float]] = []
    for row in accuracy:
        children = [((*path, rank), gain * value) for path, gain in level for rank, value in enumerate(row)]
        level = sorted(children, key=lambda node: -node[1])[:num_nodes]
        drafted += level
    best = sorted(drafted, key=lambda node: (-node[1], len(node[0])))[:num_nodes]  # of a tie the parent
    return [list(path) for path, _ in sorted(best, key=lambda node: (len(node[0]), node[0]))]
