"""Families with recurrent layers for `tiny_target`: transformers' names, and what differs from the usual shape."""

from typing import Any

from transformers import CONFIG_MAPPING, cache_utils

_SHAPE = {"num_hidden_layers": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA_NET = {
    **_SHAPE,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_THREE_OF_FOUR = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
# Latent attention; one dense layer, then experts.
_KIMI = {
    **_SHAPE,
    "layer_types": _THREE_OF_FOUR,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "topk_group": 1,
}
_CONVOLUTIONS = {**_SHAPE, "layer_types": ["conv", "conv", "full_attention", "conv"]}
_MAMBA2 = {
    **_SHAPE,
    "mamba_chunk_size": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}
_MAMBA = {**_SHAPE, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**DELTA_NET, **_SHARED_EXPERT}),
    "qwen3_5": ("qwen3_5_text", DELTA_NET),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA_NET, **_SHARED_EXPERT}),
    "olmo_hybrid": ("olmo_hybrid", {**DELTA_NET, "linear_num_key_heads": 4}),
    "kimi_linear": ("kimi_linear", {**_KIMI, "linear_head_dim": 8, "linear_num_heads": 4}),
    "bailing_hybrid": ("bailing_hybrid", {**_KIMI, "head_dim": 8, "n_group": 2, "num_mtp_layers": 0}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    # Attention, recurrence and experts are layers of their own.
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    # Attention and recurrence side by side in every layer.
    "falcon_h1": ("falcon_h1", {**_MAMBA2, "head_dim": 8, "mamba_d_ssm": 64}),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    # One block of attention, shared by two layers.
    "zamba2": (
        "zamba2",
        {
            **_SHAPE,
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "adapter_rank": 4,
        },
    ),
    "lfm2": ("lfm2", _CONVOLUTIONS),
    "lfm2_moe": ("lfm2_moe", {**_CONVOLUTIONS, **_EXPERTS}),
    # Two kinds of attention, so a mask for each type of layer.
    "lfm3": (
        "lfm3",
        {
            **_SHAPE,
            "head_dim": 8,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "sliding_window": 8,
        },
    ),
    # A convolution and a delayed value before the attention of every layer.
    "zaya": (
        "zaya",
        {
            **_SHAPE,
            "head_dim": 8,
            "num_experts": 4,
            "moe_intermediate_size": 64,
            "router_hidden_size": 16,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
            "sliding_window": 8,
        },
    ),
    "mamba2": ("mamba2", {**_SHAPE, "chunk_size": 8, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1}),
    # Mixers that read several tokens from the beginning of a text only.
    "jamba": ("jamba", {**_MAMBA, "num_experts": 4}),
    "zamba": ("zamba", {**_MAMBA, "n_mamba_heads": 2, "attention_hidden_size": 64, "attention_head_dim": 16}),
    "mamba": ("mamba", {**_SHAPE, "state_size": 8, "time_step_rank": 4}),
    "falcon_mamba": ("falcon_mamba", {**_SHAPE, "state_size": 8, "time_step_rank": 4}),
}
HAS_STATES = hasattr(cache_utils, "LinearAttentionLayer")
NAMES = tuple(
    name for name, (kind, _) in FAMILIES.items() if HAS_STATES and kind in CONFIG_MAPPING
)  # older releases of transformers have no cache for them
