"""Random encoder-decoder models, small enough for a test, whose text keeps changing and depends on its prefix."""

import functools
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedModel

from draftsmith.inference import SmallModelDrafter, Target

VOCAB_SIZE = 96
START = 2  # the decoder's first token

# The encoder has more layers than the decoder, so that they cannot be taken for one another.
_T5_SHAPE = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 24,
}
_BART_SHAPE = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}
# Kind -> (model type, its shape).
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", _T5_SHAPE | {"feed_forward_proj": "relu"}),
    "t5-v1.1": ("t5", _T5_SHAPE | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", _T5_SHAPE),
    "umt5": ("umt5", _T5_SHAPE),  # a position bias in every layer
    "longt5": ("longt5", _T5_SHAPE | {"local_radius": 4}),
    "bart": ("bart", _BART_SHAPE),  # learned positions
    "mbart": ("mbart", _BART_SHAPE),
    "blenderbot": ("blenderbot", _BART_SHAPE),
    "marian": ("marian", _BART_SHAPE),  # sinusoidal ones
    "pegasus": ("pegasus", _BART_SHAPE),
}
IS_OLD = version.parse(transformers.__version__) < version.parse("5.23")
# Their configurations the oldest releases cannot build with today's huggingface_hub.
LEFT_OUT = ("mbart", "m2m_100") if IS_OLD else ()
KINDS = tuple(_KINDS)
_KINDS["m2m_100"] = ("m2m_100", _BART_SHAPE)  # refused: counts positions from tokens


@functools.cache
def tiny_encoder_decoder(
    kind: str, seed: int = 0, *, attn_implementation: str | None = None, noise: float = 0.0, **overrides: Any
) -> PreTrainedModel:
    """Builds a random model: an encoder of 3 layers, a decoder of 2, width 32, 96 tokens, no EOS.

    Args:
        kind: one of `KINDS`, or m2m_100.
        noise: standard deviation of what is added to a weight, relative to its own: a small model that often agrees.
    """
    model_type, shape = _KINDS[kind]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": START}
    config = CONFIG_MAPPING[model_type](**({"vocab_size": VOCAB_SIZE, **ids, **shape} | overrides))
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForSeq2SeqLM._model_mapping[type(config)](config)
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and weight.requires_grad:
                torch.nn.init.normal_(weight, std=_scale(kind, name))
        torch.manual_seed(seed + 1)
        for weight in model.parameters():
            if noise and weight.dim() > 1:
                weight.data.add_(torch.randn(weight.shape) * noise * weight.data.std())
    return model.eval()


def _scale(kind: str, name: str) -> float:
    """Standard deviation of a weight: the source says less than the prefix, and a token says little about itself."""
    if "EncDecAttention.o" in name or "encoder_attn.out_proj" in name:
        return 0.08
    if "shared" in name or "embed_tokens" in name:
        return {"t5": 0.1, "longt5": 0.1, "marian": 3.0, "pegasus": 1.0}.get(kind, 0.3)
    if "relative_attention_bias" in name:
        return 2.0
    if "embed_positions" in name:
        return 1.0
    return 0.5 if kind in ("t5", "longt5", "pegasus") or "lm_head" in name else 0.3


@functools.cache
def target_of(kind: str, seed: int = 0, attn_implementation: str | None = None) -> Target:
    try:
        return Target(tiny_encoder_decoder(kind, seed, attn_implementation=attn_implementation))
    except ValueError as error:
        # In the oldest releases some know no sdpa, and UMT5 and LongT5 take no 4-D mask of their source.
        takes_no_mask = kind in ("umt5", "longt5") and "does not run" in str(error)
        if IS_OLD and ("scaled_dot_product" in str(error) or takes_no_mask):
            pytest.skip(str(error))
        raise


@functools.cache
def small_model_of(kind: str, seed: int) -> SmallModelDrafter:
    return SmallModelDrafter(tiny_encoder_decoder(kind, seed, noise=0.1))


def source_batch(batch_size: int, *, is_left_padded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Source ids [B, 11] of 11, 3, 7, 1 and 9 tokens, and their mask."""
    ids = torch.randint(3, VOCAB_SIZE, (batch_size, 11), generator=torch.Generator().manual_seed(1))
    counts = torch.tensor([11, 3, 7, 1, 9])[:batch_size]
    mask = (torch.arange(11) < counts[:, None]).long()
    if is_left_padded:
        mask = mask.flip(1)
    return ids * mask, mask
