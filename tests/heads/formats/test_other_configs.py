"""A published config that says something else than its tensors, or than heads here can be, is refused: the message
names the key and its value, the tensor that no longer fits, or what is allowed."""

from typing import Any

import pytest

from draftsmith.heads.formats.eagle.eagle3 import IDS
from draftsmith.heads.formats.registry import find_format
from draftsmith.inference import Target
from tests.heads.formats.round_trip import CHECKPOINTS, change, publish, refusal_of
from tests.heads.tiny_heads import AS_PUBLISHED, tiny_heads

SPARK = {"block_size": 4, "predicts_at_anchor": True, "markov_rank": 6, "has_confidence": True}
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dflash": ("vllm", "block", {"block_size": 4}),
    "dspark": ("vllm", "block", SPARK),
    "dflash2": ("dflash", "dflash2", {"block_size": 4, "conv_group_size": 8, "selector_rank": 6}),
    "hydra": ("hydra", "hydra", {"num_heads": 2, "use_embedding_norm": False}),
    "gguf": ("gguf", "eagle3", AS_PUBLISHED),
}
# Keys that change what a layer computes, with values that heads here cannot have.
MATHS: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.5,
    "query_pre_attn_scalar": 256,
    "logits_scaling": 8.0,
    "final_logit_softcapping": 30.0,
    "use_qk_norm": True,
    "quantization_config": {"bits": 4},
    "mlp_bias": True,
}
KEYS: list[tuple[str, dict[str, Any], str]] = [
    *(("eagle", {key: value}, key) for key, value in MATHS.items()),
    ("speculators", {"transformer_layer_config": {"logits_scaling": 8.0}}, "logits_scaling"),
    ("eagle", {"bias": False}, "fc.bias"),
    ("eagle", {"qkv_bias": True}, "layers.0.self_attn.q_proj.bias"),
    ("eagle", {"vocab_size": 256}, "vocab_size is 256"),
    ("eagle", {"num_key_value_heads": 3}, "num_attention_heads is 4 and num_key_value_heads 3"),
    ("eagle", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    ("eagle", {"hidden_act": "silly"}, "hidden_act is 'silly'"),
    ("eagle", {"sliding_window": 512}, "no layer_types says which layers"),
    ("eagle", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
    ("eagle3", {"draft_vocab_size": 50}, "draft_vocab_size is 50"),
    ("eagle3", {"fc_norm": True}, "fc_norm.0.weight"),
    ("eagle3", {IDS: [2, 4, 40], "eagle_config": {IDS: [2, 4, 40]}}, "is [2, 4, 40], and should be a list"),
    ("eagle3", {IDS: [2, 4], "eagle_config": {IDS: [2, 4]}}, "fc.weight is [32, 96]"),
    ("speculators", {"speculators_model_type": "mtp"}, "speculators_model_type is 'mtp'"),
    # speculators itself loads some layers without such a key, silently wrong.
    ("speculators", {"transformer_layer_config": {"model_type": None}}, "model_type"),
    ("speculators", {"transformer_layer_config": {"hidden_size": None}}, "hidden_size"),
    ("p-eagle", {"pard_token": 128}, "pard_token is 128"),
    ("dflash", {"dflash_config": {"target_layer_ids": None}}, "config.json has no target_layer_ids"),
    ("dflash", {"dflash_config": {"target_layer_ids": [1, 9]}}, "is [1, 9], and should be a list of layers from 0"),
    ("dflash", {"dflash_config": {"target_layer_ids": "all"}}, "target_layer_ids is 'all', and should be a list"),
    ("dflash", {"dflash_config": {"mask_token_id": None}}, "config.json has no mask_token_id"),
    ("dflash", {"dflash_config": {"mask_token_id": 400}}, "mask_token_id is 400"),
    ("dflash", {"dflash_config": {"mask_token_id": "<mask>"}}, "mask_token_id is '<mask>'"),
    ("dflash", {"rope_parameters": None, "rope_theta": None}, "config.json has no rope_theta"),
    ("dflash", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is null"),
    ("dflash", {"draft_vocab_size": 40}, "draft_vocab_size is 40"),
    ("dflash", {"num_target_layers": 36}, "num_target_layers is 36, and should be 8"),
    ("dspark", {"markov_rank": -2}, "markov_rank is -2, and should be a positive integer"),
    ("dspark", {"markov_head_type": "rnn"}, "markov_head_type is 'rnn'"),
    ("dspark", {"confidence_head_with_markov": False}, "confidence_head_with_markov differs"),
    ("dspark", {"enable_confidence_head": False}, "confidence_head.proj.weight has no place"),
    ("dflash2", {"dflash_config": {"selector_rank": None}}, "config.json has no selector_rank"),
    ("dflash2", {"dflash_config": {"conv_group_size": 5}}, "conv_group_size is 5, which does not divide"),
    ("dflash2", {"dflash_config": {"output_multiplier": 2.0}}, "output_multiplier is 2.0"),
    ("hydra", {"hydra_head_arch": "eagle-attn"}, "hydra_head_arch is 'eagle-attn'"),
    ("hydra", {"hydra_head_arch": "prefix-mlp"}, "say the opposite"),
    ("hydra", {"grounded_heads": False}, "which is Medusa"),
    ("gguf", {"eagle3.block_count": 2}, "eagle3.block_count is 2"),
    ("gguf", {"eagle3.norm_before_fc": True}, "tensor enc.output_norm.weight is missing"),
    ("gguf", {"eagle3.rope.scaling.type": "yarn"}, "scaling.type is 'yarn'"),
    ("gguf", {"eagle3.attention.value_length": 16}, "value_length is 16"),
    ("gguf", {"eagle3.attention.causal": False}, "attention.causal is False"),
    ("gguf", {"eagle3.target_layers": [1, 2, 3]}, "extract_layers is [2, 4, 5], and should be [1, 2, 3]"),
    ("gguf", {"eagle3.attention.scale": 0.1, "eagle3.logit_scale": 2.0}, "eagle3.attention.scale, eagle3.logit_scale"),
]


@pytest.mark.parametrize(("name", "keys", "message"), KEYS, ids=[f"{name}-{keys}" for name, keys, _ in KEYS])
def test_a_key_that_is_wrong_is_named(name: str, keys: dict[str, Any], message: str, target: Target) -> None:
    wanted, kind, settings = {**CHECKPOINTS, **MORE}[name]
    known = find_format(wanted, kind)
    published = change(publish(known, tiny_heads(kind, target, **settings)), config=keys)
    assert message in refusal_of(known, published, target)
