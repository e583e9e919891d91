"""Slots that training draws."""

import torch
from torch import Tensor

from draftsmith.heads.modules.anchors import draw_slots


def random_seeds(like: Tensor) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, like.shape)


def test_the_worked_example() -> None:
    """Tokens 3, 4 and 7 have a loss: they are the first that slots 1, 2 and 5 draft."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1, 0, 0]])
    for seeds in (random_seeds(mask), None):
        slots = draw_slots(mask, 8, seeds)
        assert sorted(slots[0].tolist()) == [1, 2, 5]
        assert slots[1].tolist() == [4, -1, -1]


def test_at_most_so_many_are_drawn_and_each_once() -> None:
    mask = (torch.rand(6, 40) < 0.7).long()
    slots = draw_slots(mask, 7, random_seeds(mask))
    assert slots.shape == (6, 7)
    assert (slots.sort(dim=1).values.diff(dim=1) > 0).all()
    assert (mask.gather(1, slots + 2) == 1).all()


def test_training_draws_anew_and_evenly() -> None:
    mask = torch.ones(400, 12, dtype=torch.long)
    counts = draw_slots(mask, 3, random_seeds(mask)).flatten().bincount(minlength=10)
    assert counts.numel() == 10
    assert counts.min() > 60, "each of ten slots is drawn about 120 times"


def test_a_rows_draw_depends_on_its_own_seeds() -> None:
    mask = (torch.rand(5, 40) < 0.7).long()
    seeds = random_seeds(mask)
    together = draw_slots(mask, 6, seeds)
    for row in range(5):
        longer, more = (torch.nn.functional.pad(x[row : row + 1], (0, 9)) for x in (mask, seeds))
        assert torch.equal(draw_slots(longer, 6, more), together[row : row + 1])


def test_evaluation_draws_the_same_whatever_padding_follows() -> None:
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[:, :4] = 0
    slots = draw_slots(mask, 6)
    longer = torch.nn.functional.pad(mask, (0, 50))
    assert torch.equal(draw_slots(longer, 6), slots)
    assert slots[0].max() - slots[0].min() > 15, "they spread over the text"


def test_nothing_to_draw() -> None:
    for length in (1, 2, 3, 9):
        mask = torch.zeros(2, length, dtype=torch.long)
        assert draw_slots(mask, 4, random_seeds(mask)).tolist() == [[-1], [-1]]
    assert draw_slots(torch.ones(1, 2, dtype=torch.long), 4).tolist() == [[-1]]
