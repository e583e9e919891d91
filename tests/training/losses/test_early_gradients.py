"""Gradients that are computed with the loss: what the backward pass does with them."""

import pytest
import torch
from torch import Tensor, nn

from draftsmith.training.losses.early_gradients import EarlyGradients


def add_two_chunks(weight: Tensor, state: Tensor) -> tuple[Tensor, int]:
    """The loss, and where the weight's gradient is."""
    early = EarlyGradients()
    first = torch.ones_like(weight)
    early.add(torch.tensor(1.0), [(weight, first)])
    early.add(torch.tensor(2.0), [(weight, torch.full_like(weight, 3.0)), (state, torch.ones_like(state))])
    loss = early.loss()
    assert loss is not None
    return loss, first.data_ptr()


def test_a_parameter_takes_the_tensor_itself() -> None:
    weight, leaf = nn.Parameter(torch.zeros(4, 3)), torch.zeros(2, 3, requires_grad=True)
    loss, place = add_two_chunks(weight, leaf * 2)
    assert loss == 3
    (loss * 0.5).backward()
    assert weight.grad.data_ptr() == place
    assert torch.equal(weight.grad, torch.full((4, 3), 2.0))
    assert torch.equal(leaf.grad, torch.ones(2, 3))
    add_two_chunks(weight, leaf * 2)[0].backward()  # accumulates
    assert torch.equal(weight.grad, torch.full((4, 3), 6.0))


def test_they_are_taken_once() -> None:
    weight = nn.Parameter(torch.zeros(4, 3))
    loss, _ = add_two_chunks(weight, torch.zeros(2, 3, requires_grad=True) * 2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="taken by an earlier backward"):
        loss.backward()
