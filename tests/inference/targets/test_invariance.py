"""Batch-invariant mode is refused where it cannot be kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference import Target
from draftsmith.inference.kernels.packed_weights import has_bfloat16
from draftsmith.inference.targets.probing import invariance
from tests.inference.tiny_encoder_decoders import tiny_encoder_decoder
from tests.tiny_targets import tiny_target


def test_other_attention_is_refused() -> None:
    with pytest.raises(
        ValueError, match="LlamaForCausalLM has 'eager': load the model with attn_implementation='sdpa'"
    ):
        Target.of(tiny_target("llama", attn_implementation="eager")).batch_invariant()
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has its own"):
        Target.of(tiny_encoder_decoder("t5")).batch_invariant()


def test_a_layer_that_counts_rows_is_refused() -> None:
    model = tiny_target("llama")
    layer = model.model.layers[2].mlp
    stock = layer.forward

    def forward(hidden: Tensor) -> Tensor:
        found: Tensor = stock(hidden)
        return found * (1 + 1e-6) if hidden.shape[1] > 20 else found

    layer.forward = forward
    with pytest.raises(ValueError, match=r"LlamaForCausalLM in torch.float32 on cpu, a token's scores depend on the"):
        Target.of(model).batch_invariant()


def test_a_model_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    check = invariance.check_invariance
    monkeypatch.setattr(
        "draftsmith.inference.targets.target.check_invariance", lambda target: calls.append(check(target))
    )
    target = Target.of(tiny_target("llama", dtype=torch.bfloat16))
    mode = target.batch_invariant()
    assert mode.batch_invariant() is mode
    target.batch_invariant()
    assert calls == [None]
    assert target.min_pass_tokens == 1, "the target itself stays as it is"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_weights_are_checked_by_themselves(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not has_bfloat16():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    target = Target.of(tiny_target("llama", dtype=dtype)).batch_invariant()
    packed = target.with_packed_weights()
    assert packed.min_pass_tokens == target.min_pass_tokens > 1
    assert packed.capabilities.is_known_invariant is not target.capabilities.is_known_invariant
