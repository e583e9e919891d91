"""Grouped attention under a tree mask: the numbers of transformers' own function, without repeated keys and values."""

from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.inference import Target
from draftsmith.inference.kernels import attention
from draftsmith.inference.kernels.attention import (
    GROUPED,
    LONG_PASS,
    REPEATED,
    STOCK,
    attend_exactly,
    attend_grouped,
    attend_masked,
)
from draftsmith.inference.kernels.packed_weights import has_bfloat16
from draftsmith.inference.runners.compiled import Compiler
from tests.tiny_targets import random_prompt, tiny_target


class Layer(torch.nn.Module):
    num_key_value_groups = 3
    is_causal = True


def make_inputs(num_groups: int = 2, num_tokens: int = 5, num_slots: int = 11) -> tuple[torch.Tensor, ...]:
    query = torch.randn(2, 6, num_tokens, 8)
    key, value = (torch.randn(2, num_groups, num_slots, 8) for _ in range(2))
    seen = torch.rand(2, 1, num_tokens, num_slots) > 0.4
    seen[..., 0] = True
    return query, key, value, torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("num_tokens", [5, LONG_PASS])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_numbers_are_transformers_own(scale: float | None, num_tokens: int) -> None:
    query, key, value, mask = make_inputs(num_tokens=num_tokens)
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=scale)
    found, _ = attend_grouped(Layer(), query, key, value, mask, scaling=scale)
    torch.testing.assert_close(found, expected)


def attend_with_groups(num_groups: int, mask: torch.Tensor) -> None:
    query, key, value, _ = make_inputs(num_groups)
    layer = Layer()
    layer.num_key_value_groups = 6 // num_groups
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask)
    torch.testing.assert_close(attend_grouped(layer, query, key, value, mask)[0], expected)


def test_layers_of_a_pass_share_the_rows_of_our_masks() -> None:
    mask = make_inputs()[-1]
    vars(mask)[REPEATED] = {}
    for num_groups in (3, 2, 3):
        attend_with_groups(num_groups, mask)
    assert sorted(vars(mask)[REPEATED]) == [2, 3]


def test_another_mask_may_change_between_layers() -> None:
    mask, other = make_inputs()[-1], make_inputs()[-1]
    attend_with_groups(2, mask)
    attend_with_groups(2, mask.copy_(other))


def test_traced_passes_go_through_it() -> None:
    """Torch 2.11 does not see while it traces what the trace sets in a config, so the trace finds it set."""
    model = tiny_target("llama")
    target = Target(model)
    calls: list[str] = []

    def collect(graph: Any, _: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        calls.extend(node.meta["stack_trace"] for node in nodes)
        return graph.forward

    causal = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1) > 0, torch.finfo(torch.float32).min)
    read = torch.compile(target.backbone.read, backend=collect, fullgraph=True)
    with Compiler([model]).active(), target.without_autograd():
        found = read(random_prompt(6), None, causal).last
        assert model.config._attn_implementation == GROUPED
    assert model.config._attn_implementation == STOCK
    torch.testing.assert_close(found, target.backbone.read(random_prompt(6), None).last.detach())
    assert len(calls) == target.num_layers
    assert all("attend_grouped" in call for call in calls)


def test_exact_attention_is_attention() -> None:
    query, key, value, mask = make_inputs(num_tokens=67)
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=0.2)
    found, _ = attend_grouped(Layer(), query, key, value, mask.double(), scaling=0.2)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()
    assert attend_exactly(query.double(), key.double(), value.double(), mask.double(), 0.2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_large", [False, True])
def test_exact_attention_does_not_see_gaps_or_other_rows(
    dtype: torch.dtype, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys with gaps between them, as on a path of a tree, and with other queries; other attention shows both."""
    monkeypatch.setattr(attention, "MOST_COPIED", 300 * 2 * 64 if is_large else 1 << 20)
    num_keys, num_slots = 300, 512
    query, key, value = (torch.randn(1, heads, num_slots, 64).to(dtype) for heads in (4, 2, 2))
    lowest = torch.finfo(dtype).min
    slots = torch.randperm(num_slots)[:num_keys].sort().values
    gaps = torch.full((1, 1, 60, num_slots), lowest, dtype=torch.float64)
    gaps[..., slots] = 0
    none = torch.zeros(1, 1, 4, num_keys, dtype=torch.float64)
    without = query[:, :, :4], key[:, :, slots], value[:, :, slots], none
    within = query[:, :, :60], key, value, gaps
    assert torch.equal(attend_exactly(*without, 0.1), attend_exactly(*within, 0.1)[:, :4])
    stock = [attend_masked(*rest, mask.to(dtype)) for *rest, mask in (without, within)]
    if dtype == torch.float32 or has_bfloat16():  # without oneDNN's bfloat16 it did not see them
        assert not torch.equal(stock[0], stock[1][:, :, :4])
