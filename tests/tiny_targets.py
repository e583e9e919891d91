"""Random targets of every supported family, small enough for a test and made from a configuration: no network.

Their weights are large on purpose. At the usual 0.02 a random model repeats one token for ever, and a decoder that
returns anything at all would pass; here greedy text keeps changing and depends on its whole prefix.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 128
SLIDING_WINDOW = 8
NUM_LAYERS = 6

# Family -> (configuration class, model class, what differs from the shape all of them share).
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 8, "sliding_window": SLIDING_WINDOW}),
    # Every third layer attends to everything, the others to a window: two masks in one forward pass.
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * (NUM_LAYERS // 3),
        },
    ),
}

FAMILIES = tuple(_FAMILIES)


def tiny_target(
    family: str,
    seed: int = 0,
    *,
    attn_implementation: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """Builds a random target: 6 layers, width 32, 4 heads with 2 key/value heads, 128 tokens, 256 positions, no EOS.

    The same arguments give the same weights, whatever was drawn from torch's generator before.

    Args:
        family: one of `FAMILIES`.
        seed: seed of the weights.
        attn_implementation: "sdpa" or "eager".
        dtype: dtype of the weights; they are drawn in float32 and then cast.
        overrides: configuration fields to change, for example `vocab_size=64`.
    """
    config_class, model_class, differences = _FAMILIES[family]
    fields = {
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
    config = config_class(**(fields | differences | overrides))
    config._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config)
    return model.to(dtype).eval()


def random_prompt(length: int, seed: int = 0, *, batch_size: int = 1, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Draws token ids [batch_size, length] that avoid the padding and BOS ids (0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab_size, (batch_size, length), generator=generator)
