"""Settings that a kind of heads refuses: messages name the option and the value."""

import re
from typing import Any

import pytest
import torch

from draftsmith.heads import HEAD_TYPES, create_heads
from draftsmith.inference import Target
from tests.tiny_targets import tiny_target

# Settings of which the last one is refused: the message names it, with its value.
REFUSED: dict[str, list[dict[str, Any]]] = {
    "block": [
        {"block_size": 1},
        {"num_layers": 0},
        {"markov_rank": -1},
        {"confidence_threshold": 0.3},
        {"has_confidence": True, "confidence_threshold": -1},
        {"mask_token_id": 128},
    ],
    "dflash2": [
        {"block_size": 8, "conv_kernel_size": 9},
        {"conv_group_size": 5},
        {"selector_rank": 0},
        {"selector_top_k": 129},
    ],
    "eagle": [{"ttt_steps": 0}, {"embedding_scale": 3.0}, {"feature_layers": [5]}],
    "eagle3": [{"num_key_value_heads": 3}, {"draft_vocab_size": 129}, {"num_layers": 0}, {"feature_layers": [1, 2, 1]}],
    "hydra": [{"use_prefix_attention": True, "head_dim": 7}, {"num_heads": 0}, {"num_layers": 0}],
    "kangaroo": [{"exit_layer": 6}, {"exit_layer": 2, "feature_layers": [3]}, {"confidence_threshold": 1.5}],
    "medusa": [{"num_heads": 0}, {"num_layers": -1}, {"feature_layers": [2, 6]}, {"feature_layers": [7]}],
    "mtp": [{"num_steps": 0}],
    "parallel": [{"num_depths": 1}, {"keep_ratio": 0.0}, {"own_embedding": True, "mask_token_id": 128}],
}
CASES = [pytest.param(kind, case, id=f"{kind}-{case}") for kind, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("kind", "overrides"), CASES)
def test_a_value_that_is_not_allowed(target: Target, kind: str, overrides: dict[str, Any]) -> None:
    name, value = [*overrides.items()][-1]
    with pytest.raises(ValueError, match=rf"\b{name} (is )?{re.escape(str(value))}(?![\w.])"):
        create_heads(kind, target, **overrides)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("block", {"feature_layers": []}, "feature_layers is empty"),
        ("dflash2", {"markov_rank": 4}, "markov_rank and has_confidence are DSpark's"),
        ("eagle3", {"feature_layers": []}, "feature_layers is empty"),
        ("eagle3", {"feature_layers": [1, -1, 2]}, r"feature_layers \[-1\]"),
        ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc"),
        ("hydra", {"head_dim": 8}, "head_dim .* use_prefix_attention"),
        ("parallel", {"ttt_steps": 3}, "ttt_steps .* num_depths"),
    ],
)
def test_settings_that_do_not_go_together(target: Target, kind: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_heads(kind, target, **overrides)


def test_a_key_that_does_not_exist(target: Target) -> None:
    with pytest.raises(ValueError, match=r"'draft_vocab_size' .* 'target_vocab_size'"):
        create_heads("eagle", target, draft_vocab_size=2)


def test_defaults_follow_the_target() -> None:
    """Large targets get the shapes of published recipes, small ones smaller heads; what is given wins."""
    small, large = Target(tiny_target("llama")), Target(tiny_target("llama", num_hidden_layers=36, vocab_size=70_000))
    shapes = {
        "block": {"num_layers": (2, 5), "block_size": (8, 16)},
        "kangaroo": {"exit_layer": (1, 3), "feature_layers": ([1], [3])},
        "parallel": {"num_layers": (2, 4), "num_depths": (6, 8), "draft_vocab_size": (None, 8_192)},
        "eagle3": {"draft_vocab_size": (None, 8_192), "fc_norm": (True, True), "norm_output": (True, True)},
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
