"""Random targets of every supported family, small enough for a test and made from a configuration: no network.

Their weights are large on purpose. At the usual 0.02 a random model repeats one token for ever, and a decoder that
returns anything at all would pass; here greedy text keeps changing and depends on its whole prefix.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from torch.nn.utils.rnn import pad_sequence
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from draftsmith.inference import Target
from tests import recurrent_families

VOCAB_SIZE = 128
SLIDING_WINDOW = 8
NUM_LAYERS = 6
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
ROPE_SWITCH = 192  # positions from which "llama-dynamic" and "llama-longrope" scale their RoPE


def _llama_with_rope(rope_type: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    return "llama", {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **settings}}


_WINDOW_IN_TWO_OF_THREE = {
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * (NUM_LAYERS // 3),
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# Family -> (transformers' name for the model type, what differs from the shape all of them share).
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "mistral": ("mistral", {"head_dim": 8, "sliding_window": SLIDING_WINDOW}),
    # Every third layer attends to everything, the others to a window: two masks in one forward pass.
    "gemma3": ("gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOW_IN_TWO_OF_THREE}),
    # RoPE that is rescaled once and for all; texts of these tests go well beyond the 32 original positions.
    "llama-llama3": _llama_with_rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "llama-yarn": _llama_with_rope("yarn", factor=8.0, original_max_position_embeddings=32),
    # RoPE whose scale depends on the longest position of a pass: exact below the switch only.
    "llama-dynamic": ("llama", {**_llama_with_rope("dynamic", factor=2.0)[1], "max_position_embeddings": ROPE_SWITCH}),
    "llama-longrope": _llama_with_rope(
        "longrope",
        factor=4.0,
        short_factor=[1.0, 1.1, 1.2, 1.3],
        long_factor=[1.0, 2.0, 4.0, 8.0],
        original_max_position_embeddings=ROPE_SWITCH,
    ),
    # Experts in every second layer, shared ones beside the routed, and a window in the upper layers.
    "qwen2_moe": (
        "qwen2_moe",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": SLIDING_WINDOW,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "moe_intermediate_size": 32, "head_dim": 8, "norm_topk_prob": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": SLIDING_WINDOW}),
    # Soft caps low enough to bend the scores and the logits of such small models.
    "gemma2": (
        "gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 6.0,
            "final_logit_softcapping": 8.0,
            **_WINDOW_IN_TWO_OF_THREE,
        },
    ),
    "phi3": ("phi3", {"sliding_window": SLIDING_WINDOW}),
    # An odd activation, where an MLP without gate would push every random state the same way, and the text into a loop.
    "gpt2": ("gpt2", {"activation_function": "tanh"}),
    "gpt_neox": ("gpt_neox", {"hidden_act": "tanh"}),
    "opt": ("opt", {"activation_function": "tanh", "ffn_dim": 64}),
    "starcoder2": ("starcoder2", {"hidden_act": "tanh", "sliding_window": SLIDING_WINDOW}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    "olmo2": ("olmo2", {"hidden_act": "tanh"}),
    # Layers with a window have RoPE, the others no positions at all.
    "cohere2": ("cohere2", {"logit_scale": 0.25, **_WINDOW_IN_TWO_OF_THREE}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0] * (NUM_LAYERS // 3)}),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": SLIDING_WINDOW,
            **_llama_with_rope("yarn", factor=8.0, original_max_position_embeddings=32)[1],
        },
    ),
    # Keys of 8 + 4, values of 6 channels; two dense layers, then experts chosen within the better of two groups.
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 2,
        },
    ),
}


def _is_configurable(family: str) -> bool:
    """transformers 5.4.0 refuses its own defaults for OLMo2 and Cohere2 when huggingface_hub is newer than it is."""
    if family not in ("olmo2", "cohere2") or Version(transformers.__version__) >= Version("5.23"):
        return True
    try:
        CONFIG_MAPPING[_FAMILIES[family][0]](bos_token_id=None, eos_token_id=None)
    except StrictDataclassError:
        return False
    return True


FAMILIES = tuple(filter(_is_configurable, _FAMILIES))
RECURRENT_FAMILIES = recurrent_families.NAMES
LEFT_OUT = tuple(family for family in _FAMILIES if family not in FAMILIES)  # tests cannot have them on this release
# For tests whose subject is something else than the target: plain, biased, normalised queries, one window, two masks.
CORE_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")


def _find_family(family: str) -> tuple[str, dict[str, Any]]:
    return (_FAMILIES | recurrent_families.FAMILIES)[family]


@cache
def attention_implementations(family: str) -> tuple[str, ...]:
    """Those of "sdpa" and "eager" that transformers has for this family, its own choice first."""
    has_sdpa = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[_find_family(family)[0]]]._supports_sdpa
    return ("sdpa", "eager") if has_sdpa else ("eager",)


# Every family with each of its attention implementations.
FAMILIES_AND_ATTENTION = tuple((family, kind) for family in FAMILIES for kind in attention_implementations(family))


def tiny_target(
    family: str,
    seed: int = 0,
    *,
    attn_implementation: str | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """Builds a random target: 6 layers, width 32, 4 heads with 2 key/value heads, 128 tokens, 256 positions, no EOS.

    The same arguments give the same weights, whatever was drawn from torch's generator before.

    Args:
        family: one of `FAMILIES` or `RECURRENT_FAMILIES` (4 layers).
        seed: seed of the weights.
        attn_implementation: one of `attention_implementations(family)`; None = the first of them.
        dtype: dtype of the weights; they are drawn in float32 and then cast.
        overrides: configuration fields to change, for example `vocab_size=64`.
    """
    model_type, differences = _find_family(family)
    config_class = CONFIG_MAPPING[model_type]
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    fields = {name: value for name, value in SHAPE.items() if name in known} | differences | overrides
    if "init_std" in known:  # OPT's name for it
        fields["init_std"] = overrides.get("initializer_range", SHAPE["initializer_range"])
    config = config_class(**fields)
    implementation = attn_implementation or attention_implementations(family)[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return model.to(dtype).eval()


@cache
def target_of(family: str, seed: int = 0, **settings: Any) -> Target:
    """The target of `tiny_target`, examined once in a process. For tests that do not change it."""
    return Target(tiny_target(family, seed, **settings))


def random_prompt(length: int, seed: int = 0, *, batch_size: int = 1, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Draws token ids [batch_size, length] that avoid the padding and BOS ids (0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab_size, (batch_size, length), generator=generator)


def pad_prompts(prompts: Sequence[torch.Tensor], side: str = "left") -> dict[str, torch.Tensor]:
    """Prompts [L] or [1, L] of several lengths as one batch, padded with 0: `input_ids` and `attention_mask` [B, L]."""
    rows = [prompt.flatten() for prompt in prompts]
    pairs = [(row, torch.ones_like(row)) for row in rows]
    ids, mask = (pad_sequence(list(values), batch_first=True, padding_side=side) for values in zip(*pairs, strict=True))
    return {"input_ids": ids, "attention_mask": mask}
