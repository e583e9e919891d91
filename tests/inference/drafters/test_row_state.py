"""Who sees whom in a draft. `test_drafter_contract.py` copies, drops and adds rows of every drafter."""

from __future__ import annotations

import torch

from draftsmith.inference.drafters.row_state import TreeRows


def test_the_worked_example_of_a_tree() -> None:
    tree = TreeRows(1, 4, torch.device("cpu"))
    for _ in range(2):  # the second time after the first draft was forgotten
        tree.forget_levels()
        first = tree.open_level(torch.tensor([[0, 0]]))
        second = tree.open_level(torch.tensor([[1]]))
        assert (first.own.tolist(), second.own.tolist()) == ([0, 1], [2])
        assert first.ancestors[0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
        assert second.ancestors[0].int().tolist() == [[0, 1, 1, 0]]
        assert (int(first.depth), int(second.depth), tree.depths.tolist()) == (0, 1, [0, 0, 1, 0])
        assert second.parents_of(torch.arange(10).view(1, 5, 2)).tolist() == [[[4, 5]]]
