"""Random targets that see or hear, small enough for a test, and prompts for them: no processor, no network."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2AudioForConditionalGeneration,
)

from draftsmith.inference import Target
from tests.recurrent_families import DELTA_NET
from tests.tiny_targets import SHAPE

IMAGE, VIDEO, START, END = 100, 101, 102, 103  # token ids that stand for media
_WITH_GRIDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")  # families that say the size of each image
_TEXT: dict[str, Any] = {**SHAPE, "num_hidden_layers": 4}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.5,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.5,
}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


_QWEN3_VL_TEXT = {**_TEXT, "head_dim": 8, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
_IDEFICS3 = {
    "text_config": {"model_type": "llama", **_TEXT},
    "vision_config": _VISION,
    "image_token_id": IMAGE,
    "scale_factor": 2,
    "pad_token_id": 0,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
        "image_token_index": IMAGE,
        "image_seq_length": 16,
        "vision_feature_layer": -1,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE},
        "vision_config": {**_QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
        **_QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": _QWEN3_VL_TEXT,
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        **_QWEN_IDS,
    },
    "qwen3_5": {
        "text_config": {**_QWEN3_VL_TEXT, **DELTA_NET, "layer_types": ["linear_attention", "full_attention"] * 2},
        "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16},
        **_QWEN_IDS,
    },
    "gemma3": {
        "text_config": {
            **_TEXT,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
    },
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "mllama": {
        "text_config": {
            **_TEXT,
            "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "vision_config": {
            "hidden_size": 16,
            "attention_heads": 2,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "intermediate_size": 32,
            "vision_output_dim": 48,
            "image_size": 16,
            "patch_size": 4,
            "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2]],
            "intermediate_layers_indices": [0, 1],
        },
        "image_token_index": IMAGE,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "head_dim": 8,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "attention_chunk_size": 16,
        },
        "vision_config": {
            **_VISION,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        "image_token_index": IMAGE,
    },
    "qwen2_audio": {
        "text_config": {"model_type": "qwen2", **_TEXT},
        "audio_config": {
            "num_mel_bins": 8,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 16,
            "max_source_positions": 16,
            "initializer_range": 0.5,
        },
        "audio_token_index": IMAGE,
    },
}


def tiny_multimodal(family: str, *, seed: int = 0) -> PreTrainedModel:
    """A random model of one family, in float32."""
    config = CONFIG_MAPPING[family](**deepcopy(_CONFIGS[family]))  # which configs change
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "qwen2_audio":
            model: PreTrainedModel = Qwen2AudioForConditionalGeneration(config)
        else:
            model = AutoModelForImageTextToText.from_config(config)
        for weight in model.parameters():  # Gemma 3's projection of images begins at zero
            if weight.ndim > 1 and not bool(weight.any()):
                torch.nn.init.normal_(weight, std=0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@cache
def multimodal_target(family: str) -> Target:
    """A `Target` of `tiny_multimodal`, examined once in a process."""
    return Target(tiny_multimodal(family))


def _draw(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _words(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, IMAGE, (count,), generator=generator).tolist()


def _num_tokens(family: str, size: tuple[int, int]) -> int:
    """Placeholders of an image, or of a sound."""
    if family in _WITH_GRIDS:
        return size[0] * size[1] // 4
    return {"llava": 16, "qwen2_audio": 6}.get(family, 4)


def prompts_with_media(
    family: str, rows: Sequence[tuple[int, tuple[int, int] | None, int]] = ((5, (4, 8), 6),), seed: int = 0
) -> dict[str, Any]:
    """What a processor returns for these rows, padded on the left.

    Args:
        rows: words before an image, its patches (height, width) or None for no image, and words after it. Only models
            with grids have images of several sizes.
    """
    texts: list[list[int]] = []
    for number, (before, size, after) in enumerate(rows):
        media = [] if size is None else [START, *[IMAGE] * _num_tokens(family, size), END]
        texts.append([*_words(before, seed + number), *media, *_words(after, seed + 50 + number)])
    longest = max(map(len, texts))
    input_ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    sizes = [size for _, size, _ in rows if size is not None]
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask}
    is_media = (input_ids == IMAGE).long()
    if family == "gemma3":
        inputs["token_type_ids"] = is_media
    elif family in _WITH_GRIDS:
        inputs["mm_token_type_ids"] = is_media.int()
    if not sizes:
        return inputs
    if family in _WITH_GRIDS:
        inputs["pixel_values"] = _draw((sum(h * w for h, w in sizes), 3 * 2 * 16), seed)
        inputs["image_grid_thw"] = torch.tensor([[1, h, w] for h, w in sizes])
    elif family == "qwen2_audio":
        inputs["input_features"] = _draw((len(sizes), 8, 32), seed)
        inputs["feature_attention_mask"] = torch.tensor([[1] * 24 + [0] * 8] * len(sizes))
    elif family in ("idefics3", "smolvlm"):
        most = max(size is not None for _, size, _ in rows)
        pixels = torch.zeros(len(rows), most, 3, 16, 16)
        seeing = [number for number, (_, size, _) in enumerate(rows) if size is not None]
        pixels[seeing, 0] = _draw((len(sizes), 3, 16, 16), seed)
        inputs["pixel_values"] = pixels
    else:
        inputs["pixel_values"] = _draw((len(sizes), 3, 16, 16), seed)
    return inputs
