"""EAGLE-4 checkpoints: EAGLE-3.1 with a window, and a candidate head that is left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.eagle.eagle4 import DOWN, UP, Eagle4
from draftsmith.heads.formats.published import Published
from draftsmith.inference import Target
from tests.heads.formats.eagle.checkpoints import refusal
from tests.heads.formats.round_trip import (
    assert_damage_is_named,
    assert_lost_keys_are_refused,
    assert_same_heads,
    change,
)
from tests.heads.tiny_heads import tiny_heads

WINDOW, RANK = 6, 4
SETTINGS: dict[str, Any] = {"sliding_window": WINDOW, "feature_layers": [1, 3, 6]}


def drafter(target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of a drafter in the documented layout, whose EAGLE-3 part is `tiny_heads`."""
    heads = tiny_heads("eagle3", target, **SETTINGS)
    config = {
        "architectures": ["LlamaForCausalLMEagle4"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{key: getattr(heads.config, key) for key in ("hidden_size", "intermediate_size", "head_dim", "rms_norm_eps")},
        **{key: getattr(heads.config, key) for key in ("num_attention_heads", "num_key_value_heads", "hidden_act")},
        "max_position_embeddings": heads.config.max_position_embeddings,
        "rope_theta": heads.config.rope_parameters["rope_theta"],
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "fc_norm": True,
        "norm_output": True,
        "num_aux_hidden_states": 3,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True},
        "layer_types": ["sliding_attention"],
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "efficient_lm_head_config": {"type": "low_rank", "rank": RANK, "num_candidates": 16},
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in heads.state_dict().items()}
    tensors |= {"embed_tokens.weight": target.embed_tokens.weight.detach()}  # type: ignore[union-attr, dict-item]
    tensors |= {DOWN: torch.randn(RANK, target.hidden_size), UP: torch.randn(target.vocab_size, RANK)}
    return config, tensors


def publish(target: Target) -> Published:
    config, tensors = drafter(target)
    return Published("somewhere", config, "model.safetensors", tensors)


def test_it_drafts_as_the_whole_head_does(target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Read from files: the same heads bit for bit, and one message about the candidate head."""
    config, tensors = drafter(target)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        heads = DraftHeads.from_pretrained(tmp_path, target=target)
    told = [record.getMessage() for record in caplog.records]
    assert sum("candidate head" in line for line in told) == 1
    assert any(f"({DOWN}, {UP}) is left out" in line for line in told)
    assert any("[0, 2, 5] were read as hidden_states [1, 3, 6]: EAGLE-4 counts" in line for line in told)
    assert len(told) == 2, "all keys are read"
    assert (heads.config.sliding_window, heads.feature_layers) == (WINDOW, (1, 3, 6))
    assert_same_heads(heads, tiny_heads("eagle3", target, **SETTINGS))


def test_damage_and_lost_keys_are_named(target: Target) -> None:
    published = publish(target)
    kept = change(published, {UP: None, DOWN: None})
    assert_damage_is_named(Eagle4(), kept, target, may_lack=("embed_tokens.weight",))
    assert_lost_keys_are_refused(Eagle4(), published, tiny_heads("eagle3", target, **SETTINGS))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"norm_output": None}, "config.json has no norm_output"),
        ({}, {"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2, and the config names 3 layers"),
        ({}, {"sliding_window": None}, "no sliding_window in use"),
        ({"layers.0.mlp.experts.0.weight": torch.zeros(2)}, {}, "tensor layers.0.mlp.experts.0.weight has no place"),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(
    tensors: dict[str, Tensor | None], config: dict[str, Any], message: str, target: Target
) -> None:
    assert message in refusal(change(publish(target), tensors, config), target)
