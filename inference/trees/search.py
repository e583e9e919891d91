"""The static tree that is expected to accept most, from how often each candidate is right.

Medusa, arXiv 2401.10774, section 2.3.3.

Legend: K depths, R ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def best_static_tree(accuracy: Sequence[Sequence[float]], num_nodes: int) -> list[list[int]]:
    """Adds nodes one by one, each time the one that raises the expected number of accepted tokens most.

    A node's gain is the product of the accuracies along its path. A child never gains more than its parent, nor a less
    accurate rank more than its left neighbour, so taking the best node next to the tree is optimal.

    Worked example: two depths of accuracies [0.6, 0.2] and [0.5, 0.1], three nodes:

        [0] gains 0.6, then [0, 0] gains 0.3, then [1] gains 0.2

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
    # Ranks of a depth from the most to the least accurate: a measured rank 4 can beat a rank 3.
    order = [sorted(range(len(row)), key=lambda rank, row=row: (-row[rank], rank)) for row in accuracy]  # type: ignore[misc]
    # Entries are (-gain, path, place in its depth's order); a path enters when its parent or left neighbour is taken.
    heap = [(-accuracy[0][order[0][0]], [order[0][0]], 0)]
    paths: list[list[int]] = []
    while heap and len(paths) < num_nodes:
        negative_gain, path, place = heapq.heappop(heap)
        paths.append(path)
        depth = len(path)
        if depth < len(accuracy):
            best = order[depth][0]
            heapq.heappush(heap, (negative_gain * accuracy[depth][best], [*path, best], 0))
        if place + 1 < len(order[depth - 1]):
            following = order[depth - 1][place + 1]
            parent_gain = -1.0
            for level, rank in enumerate(path[:-1]):
                parent_gain *= accuracy[level][rank]
            heapq.heappush(heap, (parent_gain * accuracy[depth - 1][following], [*path[:-1], following], place + 1))
    return sorted(paths, key=lambda path: (len(path), path))
