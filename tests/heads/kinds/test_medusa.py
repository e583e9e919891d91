"""Medusa: what head i reads and predicts."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt, target_of


def test_each_head_is_its_own_residual_blocks_and_projection() -> None:
    target = target_of("llama")
    heads: Any = tiny_heads("medusa", target, num_heads=3, num_layers=2)
    features = torch.randn(2, 5, 32)
    steps = heads.unroll(features, random_prompt(5, batch_size=2))
    weights = heads.state_dict()
    assert len(weights) == 3 * (2 * 2 + 1)
    for i, step in enumerate(steps):
        x = features
        for layer in range(2):
            name = f"heads.{i}.blocks.{layer}.linear"
            x = x + F.silu(x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
        torch.testing.assert_close(step.head(step.hidden), x @ weights[f"heads.{i}.lm_head.weight"].T)
        assert step.shift == 2 + i


def test_without_projections_of_their_own_heads_ask_the_targets_lm_head() -> None:
    target = target_of("llama")
    heads: Any = tiny_heads("medusa", target, num_heads=2, shares_lm_head=True)
    assert not any("lm_head" in name for name in heads.state_dict())
    features = torch.randn(2, 5, 32)
    for head, step in zip(heads.heads, heads.unroll(features, random_prompt(5, batch_size=2)), strict=True):
        torch.testing.assert_close(step.head(step.hidden), head.blocks(features) @ target.lm_head_weight().T)
