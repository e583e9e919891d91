"""Losslessness is token identity; a difference counts as rounding only when its two logits are shown a near-tie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def explain_difference(model: Any, expected: Tensor, got: Tensor) -> tuple[int, float, str] | None:
    """None when two token rows [L] are equal; else (position, gap, a sentence with both logits) of the difference.

    The gap is that of the model's logits for the two tokens on the common prefix, from a plain pass without cache.
    """
    if torch.equal(expected, got):
        return None
    length = min(len(expected), len(got))
    different = (expected[:length] != got[:length]).nonzero()
    position = int(different[0]) if len(different) else length
    if position >= length:
        return position, float("inf"), f"one text ends at {position}, the other goes on"
    with torch.no_grad():
        logits = model(expected[None, :position]).logits[0, -1].float()
    first, second = logits[expected[position]].item(), logits[got[position]].item()
    return (
        position,
        abs(first - second),
        (
            f"position {position}: token {int(expected[position])} has logit {first:.6f}, "
            f"token {int(got[position])} has {second:.6f}"
        ),
    )


def assert_same_text(model: Any, expected: Tensor, got: Tensor, *, tolerance: float = 1e-4) -> None:
    """Rows [B, L] are equal, or differ first at a near-tie of the target's logits (both are printed)."""
    for row in range(expected.shape[0]):
        difference = explain_difference(model, expected[row], got[row])
        if difference is not None:
            _, gap, sentence = difference
            assert gap < tolerance, sentence
            print(f"near-tie, {sentence}")
