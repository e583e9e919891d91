"""What encoder-decoder targets refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.heads import create_heads
from draftsmith.inference import Target, generate
from draftsmith.inference.drafters.small_model import SmallModelDrafter
from draftsmith.training.features.encoding import encode
from tests.inference.tiny_encoder_decoders import (
    LEFT_OUT,
    START,
    VOCAB_SIZE,
    small_model_of,
    source_batch,
    target_of,
    tiny_encoder_decoder,
)
from tests.scripted_drafter import ScriptedDrafter

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def decoder_only() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


class CountedPositions(nn.Module):
    """Positions that are counted from the cache and told by nobody."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, width))

    def forward(self, *_: Any, position_ids: Tensor) -> Tensor:
        return self.table[position_ids]  # the decoder's own count


def test_drafters_of_the_other_kind() -> None:
    small = SmallModelDrafter(decoder_only())
    with pytest.raises(ValueError, match="target is an encoder-decoder"):
        small.for_target(target_of("t5"))
    with pytest.raises(ValueError, match="target is a decoder-only"):
        small_model_of("t5", 2).for_target(Target(decoder_only()))


def test_features() -> None:
    """Trained heads, hidden states for them to train on, and any drafter that asks for some."""
    with pytest.raises(ValueError, match="encoder-decoder"):
        create_heads("medusa", target_of("t5")).bind(target_of("t5"))
    with pytest.raises(ValueError, match="SmallModelDrafter"):
        encode(target_of("t5"), torch.tensor([[3, 4]]), torch.ones(1, 2))
    ids, mask = source_batch(1)
    drafter = ScriptedDrafter([torch.tensor([START])], VOCAB_SIZE)
    with pytest.raises(ValueError, match="SmallModelDrafter"):
        generate(target_of("t5"), drafter, ids, mask, **GREEDY)


def test_sources_of_other_tokens() -> None:
    """Padding as well: the encoder looks it up."""
    token = VOCAB_SIZE
    ids, mask = source_batch(2)
    ids[1, 4] = token
    with pytest.raises(ValueError, match=f"token 4 of row 1 .*{token}; .* {VOCAB_SIZE - 1}"):
        generate(target_of("t5"), None, ids, mask, **GREEDY)


def test_positions_that_cannot_be_told() -> None:
    model = copy.deepcopy(tiny_encoder_decoder("bart"))
    model.model.decoder.embed_positions = CountedPositions(model.config.d_model)
    models = [model, *(tiny_encoder_decoder(kind) for kind in ("m2m_100",) if kind not in LEFT_OUT)]
    for one in models:
        with pytest.raises(ValueError, match="positions"):
            Target(one)
