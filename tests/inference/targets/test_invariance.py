"""Batch-invariant mode is refused where it cannot be kept."""

from __future__ import annotations

import pytest
from torch import Tensor

from draftsmith.inference import Target
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


def test_packed_weights_are_checked_by_themselves() -> None:
    target = Target.of(tiny_target("llama")).batch_invariant()
    packed = target.with_packed_weights()
    assert packed.min_pass_tokens == target.min_pass_tokens > 1
    assert packed.capabilities.is_known_invariant is not target.capabilities.is_known_invariant
