"""cost.py: its costs are those of the real modules."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from draftsmith.scripts.benchmarks.training.cost import find_draft_cost, find_target_cost
from draftsmith.scripts.measuring.operations import count_operations

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


def test_a_token_meets_a_few_of_the_experts() -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 128}
    few, many = (
        Qwen3MoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_experts=n, num_experts_per_tok=2)
        for n in (2, 8)
    )
    more = find_target_cost(many, 32).forward - find_target_cost(few, 32).forward
    assert more == 2 * 2 * 6 * 64, "only the router grows"


@pytest.mark.slow
def test_recomputed_states_need_less_memory() -> None:
    whole, less = (find_draft_cost(SMALL, 64, recomputes=recomputes) for recomputes in (False, True))
    assert less.parameters == whole.parameters
    assert less.kept_per_token < 0.7 * whole.kept_per_token
    assert less.unroll > whole.unroll


@pytest.mark.parametrize(
    ("kernel", "more"), [("flash_attention", (0.0, True)), ("efficient_attention", (None, False, 0.0, True))]
)
def test_attention_of_grouped_heads_counts_like_that_of_all_heads(kernel: str, more: tuple[object, ...]) -> None:
    """The kernels for GPUs: torch 2.11 has no formula for groups. Counted is the half that a causal mask leaves."""
    query, key = (torch.empty(2, heads, 8, 16, device="meta") for heads in (4, 2))
    with count_operations() as counter:
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")(query, key, key, *more)
    assert counter.get_total_flops() == 2 * (2 * 4) * 8 * 8 * 16
