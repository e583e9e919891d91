"""scripts/benchmarks/recipes.py: costs that are derived from the modules themselves, and the page that shows them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from scripts.benchmarks.recipe_costs import TargetShape, draft_cost, target_cost
from scripts.benchmarks.recipes import PAGE, RECIPES, ROWS

SMALL = TargetShape("small", 5, 64, 96, 4, 2, 16, 128, is_tied=True)


def test_the_page_says_what_is_computed() -> None:
    """Of the first target; `python scripts/benchmarks/recipes.py --check` compares all of them."""
    shown = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = {row[0].removeprefix("| "): row[1] for row in shown}
    for title, cell in ROWS.items():
        assert cells[title] == cell(RECIPES[0]), title


def test_operations_of_a_target_are_those_that_torch_counts() -> None:
    """But for the half of the attention's products that a causal mask takes away, which torch counts as well."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SMALL.config)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 32, dtype=torch.long))
    cost = target_cost(SMALL, 32)
    upper_half = 4 * SMALL.num_layers * SMALL.num_heads * SMALL.head_dim * 16
    assert counter.get_total_flops() == 32 * (cost.forward + upper_half + cost.lm_head)
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_what_is_kept_grows_with_the_length() -> None:
    short, long = draft_cost(SMALL, 768), draft_cost(SMALL, 1280)
    assert short.parameters == long.parameters
    assert long.kept_per_token == pytest.approx(short.kept_per_token, rel=0.05)
    assert long.unroll > short.unroll  # per token: attention
