"""Operations are counted as those of the products that a causal mask leaves."""

from __future__ import annotations

import pytest
import torch

from draftsmith.scripts.benchmarks.operations import count_operations


@pytest.mark.parametrize(
    ("kernel", "more"), [("flash_attention", (0.0, True)), ("efficient_attention", (None, False, 0.0, True))]
)
def test_attention_of_grouped_heads_counts_like_that_of_all_heads(kernel: str, more: tuple[object, ...]) -> None:
    """The kernels for GPUs: torch 2.11 has no formula for groups. Counted is the half that a causal mask leaves."""
    query, key = (torch.empty(2, heads, 8, 16, device="meta") for heads in (4, 2))
    with count_operations() as counter:
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")(query, key, key, *more)
    assert counter.get_total_flops() == 2 * (2 * 4) * 8 * 8 * 16
