"""Slots that training draws."""

from __future__ import annotations

import torch

from heads.modules.anchors import draw_slots


def test_the_worked_example() -> None:
    """Tokens 3, 4 and 7 have a loss: they are the first that slots 1, 2 and 5 draft."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1, 0, 0]])
    for is_random in (True, False):
        slots = draw_slots(mask, 8, is_random=is_random)
        assert sorted(slots[0].tolist()) == [1, 2, 5]
        assert slots[1].tolist() == [4, -1, -1]


def test_at_most_so_many_are_drawn_and_each_once() -> None:
    mask = (torch.rand(6, 40) < 0.7).long()
    slots = draw_slots(mask, 7, is_random=True)
    assert slots.shape == (6, 7)
    assert (slots.sort(dim=1).values.diff(dim=1) > 0).all()
    assert (mask.gather(1, slots + 2) == 1).all()


def test_training_draws_anew_and_evenly() -> None:
    mask = torch.ones(400, 12, dtype=torch.long)
    counts = draw_slots(mask, 3, is_random=True).flatten().bincount(minlength=10)
    assert counts.numel() == 10
    assert counts.min() > 60, "each of ten slots is drawn about 120 times"


def test_evaluation_draws_the_same_whatever_padding_follows() -> None:
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[:, :4] = 0
    slots = draw_slots(mask, 6, is_random=False)
    longer = torch.nn.functional.pad(mask, (0, 50))
    assert torch.equal(draw_slots(longer, 6, is_random=False), slots)
    assert slots[0].max() - slots[0].min() > 15, "they spread over the text"


def test_fewer_are_the_first_of_more() -> None:
    mask = torch.ones(1, 30, dtype=torch.long)
    assert torch.equal(draw_slots(mask, 4, is_random=False), draw_slots(mask, 9, is_random=False)[:, :4])


def test_nothing_to_draw() -> None:
    for length in (1, 2, 3, 9):
        assert draw_slots(torch.zeros(2, length, dtype=torch.long), 4, is_random=True).tolist() == [[-1], [-1]]
    assert draw_slots(torch.ones(1, 2, dtype=torch.long), 4, is_random=False).tolist() == [[-1]]
