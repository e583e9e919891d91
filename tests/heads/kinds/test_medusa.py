"""Medusa: what head i reads and predicts, and how it starts."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from draftsmith.heads import create_heads
from draftsmith.inference import Target
from draftsmith.training.features.encoding import encode
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt, target_of, tiny_target


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


def test_an_untrained_head_repeats_the_lm_head() -> None:
    model: Any = tiny_target("qwen2")
    target = Target(model)
    heads = create_heads("medusa", target)
    input_ids = random_prompt(9)
    encoded = encode(target, input_ids, torch.ones_like(input_ids), feature_layers=heads.feature_layers)
    assert heads.feature_layers == (6,)
    assert torch.equal(encoded.features, encoded.last_hidden)
    expected = model(input_ids).logits
    for step in heads.unroll(encoded.features, input_ids):
        torch.testing.assert_close(step.head(step.hidden), expected)


def test_without_projections_of_their_own_heads_ask_the_targets_lm_head() -> None:
    target = target_of("llama")
    heads: Any = tiny_heads("medusa", target, num_heads=2, shares_lm_head=True)
    assert not any("lm_head" in name for name in heads.state_dict())
    features = torch.randn(2, 5, 32)
    for head, step in zip(heads.heads, heads.unroll(features, random_prompt(5, batch_size=2)), strict=True):
        torch.testing.assert_close(step.head(step.hidden), head.blocks(features) @ target.lm_head_weight().T)
