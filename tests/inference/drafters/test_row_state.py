"""Rows of a state field by field, and who sees whom in a draft; `test_drafter_contract.py` asks it of every drafter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.drafters.row_state import RowState, TreeRows


@dataclass
class Inner(RowState):
    values: Tensor
    row_fields = ("values",)


@dataclass
class Outer(RowState):
    """With every sort of field; `note` has no rows."""

    parts: list[Inner]
    own: Inner | None
    seen: Tensor
    note: str = "one"
    row_fields = ("parts", "own")
    slot_fields = ("seen",)


def make(*rows: int) -> Outer:
    values = torch.tensor(rows)
    return Outer([Inner(values.clone()), Inner(10 * values)], None, values[:, None].repeat(1, 4))


def test_every_field_with_rows_follows() -> None:
    state = make(1, 2, 3)
    state.keep_rows([0, 2])
    state.add_rows(make(7), 3)
    assert [part.values.tolist() for part in state.parts] == [[1, 3, 7], [10, 30, 70]]
    assert state.seen[:, 0].tolist() == [1, 3, 7]
    fresh = make(0, 0)
    fresh.copy_rows(state, torch.tensor([2, 0]), torch.tensor([2, 1]), 2)
    assert fresh.seen.tolist() == [[7, 7, 0, 0], [1, 1, 0, 0]], "no slot beyond the longest row's"
    assert fresh.parts[0].values.tolist() == [0, 0], "the draft is not copied"


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
