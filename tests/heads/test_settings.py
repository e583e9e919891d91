"""Settings that a kind of heads refuses, and with which words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from draftsmith.heads import HEAD_TYPES, create_heads
from draftsmith.heads.kinds.medusa import MedusaConfig
from draftsmith.inference import Target
from tests.tiny_targets import tiny_target

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "block": [
        ({"block_size": 1}, "block_size is 1; allowed is 2 or more"),
        ({"block_size": 0, "predicts_at_anchor": True}, "block_size is 0; allowed is 1 or more"),
        ({"num_layers": 0}, "num_layers is 0; allowed is 1 or more"),
        ({"num_anchors": 0}, "num_anchors is 0; allowed is 1 or more"),
        ({"markov_rank": -1}, "markov_rank is -1; allowed is 0 or more"),
        ({"loss_decay": 0.0}, "loss_decay is 0.0; allowed is a number above 0"),
        ({"confidence_threshold": 0.3}, "these heads have no confidence head"),
        ({"has_confidence": True, "confidence_threshold": -1}, "confidence_threshold is -1; allowed is 0 to 1"),
        ({"feature_layers": []}, "feature_layers is empty; block drafters read at least one layer"),
        ({"mask_token_id": 128}, "mask_token_id is 128; allowed is 0 to 127"),
        ({"blok_size": 4}, "did you mean 'block_size'"),
    ],
    "eagle": [
        ({"ttt_steps": 0}, "ttt_steps is 0; allowed is 1 or more (EAGLE-1 uses 1, HASS 3, EAGLE-3 7)"),
        ({"feature_noise": -0.1}, "feature_noise is -0.1; allowed is 0 (none) or more"),
        ({"embedding_scale": 3.0}, "embedding_scale is 3.0; allowed are powers of two"),
        ({"token_loss_weight": 1.0}, "token_loss_weight is 1.0, and the loss is no longer a key of EAGLE's"),
        ({"feature_loss_weight": 0.0}, "train with the option loss_type (the paper's: smooth_l1+0.1*distillation)"),
        (
            {"feature_layers": [5]},
            "feature_layers is [5]; EAGLE-1 continues the target's last state, so allowed is [6]",
        ),
        ({"draft_vocab_size": 10}, "unknown config key 'draft_vocab_size'"),
    ],
    "eagle3": [
        ({"num_key_value_heads": 3}, "num_attention_heads is 4 and num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim is 7; rotary positions need an even number"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; allowed is 1 to the target's 128"),
        ({"draft_vocab_size": 129}, "draft_vocab_size is 129; allowed is 1 to the target's 128"),
        ({"ttt_steps": 0}, "ttt_steps is 0"),
        ({"feature_layers": [1, 2, 7]}, "feature_layers [7] do not exist; allowed are 0"),
        ({"feature_layers": [1, -1, 2]}, "feature_layers [-1] do not exist"),
        ({"feature_layers": [1, 2, 1]}, "feature_layers [1, 2, 1] repeat a layer"),
        ({"feature_layers": []}, "feature_layers is empty"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc both norm the features before fc"),
        ({"vocab_size_draft": 3}, "did you mean 'draft_vocab_size'"),
    ],
    "hydra": [
        ({"use_prefix_attention": True, "head_dim": 7}, "head_dim is 7; rotary positions need an even number"),
        ({"num_heads": 0}, "num_heads is 0 and num_layers 1; allowed is 1 or more of each"),
        ({"num_layers": 0}, "num_heads is 4 and num_layers 0"),
        ({"dropout": 1.0}, "dropout is 1.0; allowed is 0"),
        ({"feature_layers": [2, 6]}, "feature_layers is [2, 6]; Hydra reads one layer"),
        ({"head_dim": 8}, "head_dim given, but only the prefix layer reads them"),
        ({"num_layer": 2}, "unknown config key 'num_layer' for hydra heads; did you mean 'num_layers'"),
    ],
    "kangaroo": [
        ({"exit_layer": 0}, "exit_layer is 0; allowed is 1 to 5 for a target of 6"),
        ({"exit_layer": 6}, "exit_layer is 6; allowed is 1 to 5 for a target of 6"),
        ({"exit_layer": -1}, "exit_layer is -1; allowed is 1 to 5 for a target of 6"),
        ({"exit_layer": 2, "feature_layers": [3]}, "feature_layers is [3] and exit_layer 2; "),
        ({"confidence_threshold": 1.5}, "confidence_threshold is 1.5; allowed is 0 to 1, or null"),
    ],
    "medusa": [
        ({"num_heads": 0}, "num_heads is 0 and num_layers 1; allowed are >= 1 and >= 0"),
        ({"num_layers": -1}, "num_heads is 5 and num_layers -1"),
        ({"feature_layers": [2, 6]}, "feature_layers is [2, 6]; Medusa reads one layer"),
        ({"feature_layers": [7]}, "feature_layers [7] do not exist"),
        ({"num_head": 3}, "unknown config key 'num_head' for medusa heads; did you mean 'num_heads"),
    ],
    "mtp": [
        ({"num_steps": 0}, "num_steps is 0; allowed is 1 or more"),
        ({"feature_layers": [2, 6]}, "feature_layers is [2, 6]; MTP reads one state"),
        ({"share_blocks": True}, "unknown config key 'share_blocks' for mtp heads; did you mean 'share_block'"),
    ],
    "parallel": [
        ({"num_depths": 1}, "num_depths is 1 and num_layers"),
        ({"num_layers": 0}, "num_layers 0; allowed are at least 2 and 1"),
        ({"keep_ratio": 0.0}, "keep_ratio is 0.0; allowed is a share above 0"),
        ({"min_keep_ratio": 1.5}, "min_keep_ratio is 1.5; allowed is a share above 0"),
        ({"ttt_steps": 3}, "set num_depths instead"),
        ({"mask_token_id": 3}, "mask_token_id is 3, a row of embeddings that the heads train: set own_embedding=true"),
        ({"mask_token_id": 128, "own_embedding": True}, "mask_token_id is 128; allowed is 0 to 127"),
        ({"num_depth": 3}, "did you mean 'num_depths'"),
    ],
}
CASES = [pytest.param(kind, *case, id=f"{kind}-{case[0]}") for kind, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("kind", "overrides", "message"), CASES)
def test_a_value_that_is_not_allowed(target: Target, kind: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        create_heads(kind, target, **overrides)


def test_every_kind_has_refusals() -> None:
    assert REFUSED.keys() == HEAD_TYPES.keys()


def test_the_key_of_another_kind() -> None:
    with pytest.raises(ValueError, match="head_type is 'eagle3', but this is the config of medusa heads"):
        MedusaConfig.from_dict({"head_type": "eagle3"})


def test_unknown_kind(target: Target) -> None:
    with pytest.raises(ValueError, match=f"unknown head_type 'eagle9'; known kinds: {', '.join(sorted(HEAD_TYPES))}"):
        create_heads("eagle9", target)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("eagle3", "a target of 1 layer(s) has too few"),
        ("kangaroo", "this target has 1 layer; Kangaroo exits before the last layer"),
    ],
)
def test_a_target_of_one_layer(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        create_heads(kind, tiny_target("llama", num_hidden_layers=1))


def test_defaults_follow_the_target() -> None:
    """Large targets get the shapes of published recipes, small ones smaller heads; what is given wins."""
    small, large = Target(tiny_target("llama")), Target(tiny_target("llama", num_hidden_layers=36, vocab_size=70_000))
    shapes = {
        "block": {"num_layers": (2, 5), "block_size": (8, 16)},
        "parallel": {"num_layers": (2, 4), "num_depths": (6, 8), "draft_vocab_size": (None, 32_000)},
        "eagle3": {"draft_vocab_size": (None, 32_000), "fc_norm": (True, True), "norm_output": (True, True)},
    }
    for kind, settings in shapes.items():
        for target, place in ((small, 0), (large, 1)):
            config = HEAD_TYPES[kind].config_class.from_target(target)
            assert {name: getattr(config, name) for name in settings} == {
                name: x[place] for name, x in settings.items()
            }
    config = HEAD_TYPES["eagle3"].config_class.from_target(large, draft_vocab_size=None, norm_before_fc=True)
    assert config.draft_vocab_size is None
    assert not config.fc_norm


def test_embeddings_get_the_scale_of_the_states() -> None:
    model = tiny_target("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.1)
        model.model.norm.weight.fill_(3.0)
    assert create_heads("eagle", Target(model)).config.embedding_scale == 32.0  # 3 / 0.1, to a power of two
    assert create_heads("eagle", Target(model), embedding_scale=1.0).config.embedding_scale == 1.0
