"""training_cost.py: its costs are those of the real modules."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from scripts.benchmarks.training_cost import CostArguments, estimate, find_draft_cost, find_target_cost

SMALL = LlamaConfig(
    num_hidden_layers=5,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=128,
    tie_word_embeddings=True,
)


def test_operations_of_a_target_are_those_that_torch_counts() -> None:
    """torch also counts the half of the attention's products that a causal mask removes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SMALL)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 32, dtype=torch.long))
    cost = find_target_cost(SMALL, 32)
    upper_half = 4 * SMALL.num_hidden_layers * SMALL.num_attention_heads * SMALL.head_dim * 16
    assert counter.get_total_flops() == 32 * (cost.forward + upper_half + cost.lm_head)
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_kept_memory_grows_with_the_length() -> None:
    short, long = find_draft_cost(SMALL, 768), find_draft_cost(SMALL, 1280)
    assert short.parameters == long.parameters
    assert long.kept_per_token == pytest.approx(short.kept_per_token, rel=0.05)
    assert long.unroll > short.unroll  # per token: attention


def test_more_gpus_take_less_time_and_shards_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.benchmarks.training_cost.LENGTH", 256)
    one = estimate(CostArguments("small", conversations=1_000_000_000), SMALL)
    eight = estimate(CostArguments("small", conversations=1_000_000_000, num_gpus=8, num_shards=8), SMALL)
    title = "training, hours (2 epochs)"
    assert float(eight[title]) == pytest.approx(float(one[title]) / 8, rel=0.1)
    assert one["parameters of the heads"] == eight["parameters of the heads"]
    with pytest.raises(ValueError, match="got --num_gpus 0: give at least 1"):
        CostArguments("small", num_gpus=0)
