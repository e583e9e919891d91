"""EAGLE-4 checkpoints: EAGLE-3.1 with a window, and a candidate head that is left out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads.formats.eagle.eagle4 import DOWN, UP, Eagle4
from draftsmith.heads.formats.eagle.engines import VLLMEagle3
from draftsmith.heads.formats.published import OWN_KEY, Published
from draftsmith.inference import Target
from tests.heads.formats.round_trip import (
    assert_damage_is_named,
    assert_lost_keys_are_refused,
    assert_same_heads,
    change,
    publish,
    read,
    refusal,
)
from tests.heads.tiny_heads import tiny_heads

SETTINGS: dict[str, Any] = {"sliding_window": 6, "feature_layers": [1, 3, 6]}
# The documented layout, where it differs from vLLM's EAGLE-3.
KEYS: dict[str, Any] = {
    OWN_KEY: None,
    "architectures": ["LlamaForCausalLMEagle4"],
    "num_aux_hidden_states": 3,
    "eagle_aux_hidden_state_layer_ids": None,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]},
    "efficient_lm_head_config": {"type": "low_rank", "rank": 4, "num_candidates": 16},
}


def drafter(target: Target) -> Published:
    candidate_head = {DOWN: torch.randn(4, target.hidden_size), UP: torch.randn(target.vocab_size, 4)}
    return change(publish(VLLMEagle3(), tiny_heads("eagle3", target, **SETTINGS)), candidate_head, KEYS)


def test_it_drafts_as_the_whole_head_does(target: Target) -> None:
    """The same heads bit for bit, and one message about the candidate head."""
    imported, heads = read(drafter(target), target)
    assert heads.config.sliding_window == SETTINGS["sliding_window"]
    assert_same_heads(heads, tiny_heads("eagle3", target, **SETTINGS))
    counted, left_out = imported.notes
    assert "[0, 2, 5] were read as hidden_states [1, 3, 6]: EAGLE-4 counts" in counted
    assert f"({DOWN}, {UP}) is left out" in left_out


def test_damage_and_lost_keys_are_named(target: Target) -> None:
    published = drafter(target)
    kept = change(published, {UP: None, DOWN: None})
    assert_damage_is_named(Eagle4(), kept, target, may_lack=("embed_tokens.weight",))
    assert_lost_keys_are_refused(Eagle4(), published, tiny_heads("eagle3", target, **SETTINGS))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"norm_output": None}, "config.json has no norm_output"),
        ({}, {"sliding_window": None}, "sliding_window is null"),
        ({"layers.0.mlp.experts.0.weight": torch.zeros(2)}, {}, "tensor layers.0.mlp.experts.0.weight has no place"),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(
    tensors: dict[str, Tensor | None], config: dict[str, Any], message: str, target: Target
) -> None:
    assert message in refusal(change(drafter(target), tensors, config), target)
