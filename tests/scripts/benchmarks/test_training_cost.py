"""training_cost.py: its costs are those of the real modules."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from scripts.benchmarks.training_cost import find_target_cost

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
