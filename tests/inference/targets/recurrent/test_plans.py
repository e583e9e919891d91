"""The worked examples of the plans, and trees against their nodes one by one."""

import torch

from draftsmith.inference.targets.recurrent.plans import Levels, group_rows

EXAMPLE = [-1, 0, 0, 1]


def test_levels() -> None:
    levels = Levels.of_parents(torch.tensor([EXAMPLE]))
    assert [nodes.tolist() for nodes in levels.nodes] == [[[0]], [[1, 2]], [[3]]]
    assert [None if parents is None else parents.tolist() for parents in levels.parents] == [None, [0, 0], [0]]
    assert levels.homes.tolist() == [[0, 1, 2, 3]]


def test_every_node_comes_after_its_ancestors() -> None:
    """Rows of different trees, with padding. A "mixer" that adds up what it reads gives each node its path's sum."""
    rows = [[-1, 0, 0, 1, 1, 3, -1], [-1, 0, 1, 2, 3, 0, 5]]
    values = torch.randint(1, 100, (2, 7, 1))
    levels = Levels.of_parents(torch.tensor(rows))
    states, outputs = torch.zeros(2, 1, 1, dtype=torch.long), []
    for level, parents in enumerate(levels.parents):
        states = (states if parents is None else states[parents]) + levels.take(values, level)
        outputs.append(states)
    found = levels.to_nodes(outputs)
    for row, parents in enumerate(rows):
        for node, parent in enumerate(parents):
            if parent >= 0:
                assert found[row, node] == found[row, parent] + values[row, node]
    assert torch.equal(found[:, 0], values[:, 0])


def test_rows_of_equal_counts_are_read_together() -> None:
    groups = group_rows([3, 0, 3, 2, 3], [5, 5, 0, 5, 7], torch.device("cpu"))
    assert [(group.rows.tolist(), group.count, group.is_first) for group in groups] == [
        ([3], 2, False),
        ([0, 4], 3, False),
        ([2], 3, True),
    ]
