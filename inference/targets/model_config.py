"""Facts about a model without a forward pass: attention, windows, length limits, devices, quantisation, Auto class."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, PreTrainedModel

from draftsmith.inference.kernels.attention import GROUPED, STOCK

# Layer types whose whole past stays in the cache, so that a step can be rolled back.
_ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention")
# Layer types with a recurrent state, and the attention that they have beside it.
_RECURRENT_LAYER_TYPES = {
    "linear_attention": None,
    "conv": None,
    "hybrid": "full_attention",
    "hybrid_sliding": "sliding_attention",
}
_STATELESS_LAYER_TYPES = ("moe", "mlp")  # in models whose attention and MLPs are layers of their own
_ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")
_TAKES_CHOSEN_STATES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
# Asked once: torch 2.11 does not compile the question.
WITH_AUTOCAST = tuple(
    kind for kind in ("cpu", "cuda", "mps", "xpu", "hpu", "xla", "mtia") if torch.amp.is_autocast_available(kind)
)
# Packages whose layers and tensors hold quantised weights, also in models that transformers did not load as quantised.
_QUANTISERS = ("bitsandbytes.", "torchao.", "torch.ao.", "optimum.quanto.")


@dataclass(frozen=True)
class LengthLimit:
    """max_length: number of positions, or None. reason: the origin of the number, for error messages."""

    max_length: int | None
    reason: str


def find_causal_lm(model: nn.Module) -> Any:
    """The transformers model inside `model`: a PEFT model keeps its adapters in place."""
    causal_lm: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(causal_lm, PreTrainedModel):
        raise ValueError(f"a target is a transformers causal LM (AutoModelForCausalLM), got {type(model).__name__}")
    return causal_lm


def unwrap_model(model: nn.Module) -> Any:
    """The transformers model inside `model`, after the checks that need the config only."""
    causal_lm = find_causal_lm(model)
    check_adapters(model)
    name, config = type(causal_lm).__name__, causal_lm.config
    if causal_lm.get_output_embeddings() is None:
        loader = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
        raise ValueError(f"{name} has no LM head: load it with {loader}")
    text_config = config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    known = {*_ATTENTION_LAYER_TYPES, *_RECURRENT_LAYER_TYPES, *_STATELESS_LAYER_TYPES}
    if other := ", ".join(sorted(layer_types - known)):
        raise ValueError(
            f"{name} has layers that cannot be rolled back after a rejected draft, or that mask by rules of their own "
            f"({other}): a target has layers of the types {', '.join(sorted(known))} only"
        )
    if (implementation := find_attention(causal_lm)) not in _ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {implementation!r} cannot take a tree mask: load the model with "
            f"attn_implementation='sdpa' or 'eager'"
        )
    backbone = causal_lm.base_model
    if any("alibi" in name and getattr(backbone, name) for name in dir(backbone)):
        raise ValueError(
            f"{name} has ALiBi, which measures distances in cache slots instead of positions, so the siblings of a "
            f"node would change its scores: use a model with RoPE or learned positions"
        )
    if getattr(text_config, "use_bidirectional_attention", None) not in (None, False):
        raise ValueError(f"{name} attends in both directions (use_bidirectional_attention): it is not a causal LM")
    refuse_training(model)
    return causal_lm


def is_recurrent(causal_lm: Any) -> bool:
    """Whether the model has recurrent layers: by the types of its layers, or if they have none, by its class."""
    layer_types = getattr(causal_lm.config.get_text_config(), "layer_types", None)
    if layer_types:
        return any(kind in _RECURRENT_LAYER_TYPES for kind in layer_types)
    return bool(getattr(causal_lm, "_is_stateful", False))


def find_attention(causal_lm: Any) -> str:
    """The attention implementation that the user has chosen."""
    implementation: str = causal_lm.config.get_text_config()._attn_implementation
    return STOCK if implementation == GROUPED else implementation  # GROUPED: a pass, or a compiled text, is under way


def has_attention_interface(causal_lm: Any) -> bool:
    """Whether layers call the function of the implementation's name. Models without this interface (Falcon) compare the
    name with "sdpa", and would take that of grouped attention for eager attention."""
    return bool(getattr(causal_lm, "_supports_attention_backend", False))


def refuse_training(model: nn.Module) -> None:
    """Refuses a model in training mode (ValueError)."""
    if model.training:
        raise ValueError(
            f"{type(model).__name__} is in training mode, where dropout makes every pass different: call model.eval()"
        )


def check_adapters(model: Any) -> None:
    """Refuses (ValueError) adapters, active or not, that are more than layers added to the model."""
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError("a PEFT model with virtual prompt tokens shifts every position: merge it or use LoRA")
        if (tokens := getattr(config, "alora_invocation_tokens", None)) is not None:
            raise ValueError(
                f"the adapter {name!r} is an aLoRA (alora_invocation_tokens={tokens}): PEFT's own forward and generate "
                f"choose the token from which it applies; they do not run here, so it would never apply. Use LoRA "
                f"without alora_invocation_tokens, or remove the adapter with delete_adapter({name!r})"
            )


def request_states(layers: Iterable[int]) -> list[int] | bool:
    """The argument `output_hidden_states` that gives the states of these layers: all states, or none, in releases that
    do not take a list, or count the layers of a list otherwise (transformers 5.17)."""
    chosen = sorted(set(layers))
    return chosen if chosen and _TAKES_CHOSEN_STATES else bool(chosen)


def find_compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products with weights of `dtype` compute: autocast's, where it is on."""
    if device.type not in WITH_AUTOCAST or not torch.is_autocast_enabled(device.type):
        return dtype
    return torch.get_autocast_dtype(device.type)


def refuse_autocast(device: torch.device, dtype: torch.dtype) -> None:
    """Refuses (ValueError) a model of `dtype` where autocast would compute in another dtype."""
    if (used := find_compute_dtype(device, dtype)) == dtype:
        return
    raise ValueError(
        f"torch.autocast to {used} is on for {device.type}, and the target is in {dtype}: its rounding would make the "
        f"scores of a tree differ too much from those of single tokens. Construct the target and decode outside of "
        f"autocast; for half precision load the model with dtype={used}"
    )


def find_device(module: Any) -> torch.device:
    """The device of a module's inputs: its weight's, or the one to which accelerate brings an offloaded weight."""
    weight: Tensor = module.weight
    if weight.device.type != "meta":
        return weight.device
    execution_device = find_execution_device(module)
    if execution_device is None:
        raise ValueError("the model's weights are on the meta device: load them, for example with from_pretrained")
    return torch.device(execution_device)


def find_execution_device(module: nn.Module) -> Any:
    """The device on which accelerate runs a module; None without accelerate."""
    return getattr(getattr(module, "_hf_hook", None), "execution_device", None)


def is_quantised(model: Any) -> bool:
    """Whether the model is marked as quantised, or holds layers or weights of a package that quantises."""
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None) is not None:
        return True
    return any(type(part).__module__.startswith(_QUANTISERS) for part in (*model.modules(), *model.parameters()))


def chooses_experts(model: nn.Module) -> bool:
    """Whether the model routes tokens to experts, by the names that transformers gives to such layers."""
    words = ("expert", "router", "moe")
    return any(word in name for name, _ in model.named_modules() for word in words)


def find_layer_windows(text_config: Any) -> dict[str, int | None]:
    """Sliding window in positions, or None for full attention, per distinct type of layers with attention."""
    window = getattr(text_config, "sliding_window", None)
    if getattr(text_config, "use_sliding_window", True) is False:
        window = None
    layer_types = getattr(text_config, "layer_types", None)
    if not layer_types:  # all layers alike (llama; mistral, phi3 with a window)
        return {"full_attention": None} if window is None else {"sliding_attention": int(window)}
    windows: dict[str, int | None] = {}
    for layer_type in sorted(set(layer_types)):
        attention = _RECURRENT_LAYER_TYPES.get(layer_type, layer_type)
        if attention is None or layer_type in _STATELESS_LAYER_TYPES:
            continue
        if attention == "sliding_attention" and window is None:
            raise ValueError(f"the config has {layer_type} layers but no sliding_window ({window!r})")
        windows[layer_type] = int(window) if attention == "sliding_attention" and window is not None else None
    return windows


def find_types_without_attention(text_config: Any) -> tuple[str, ...]:
    """The distinct types of layers that are not in `find_layer_windows`."""
    types = set(getattr(text_config, "layer_types", None) or ())
    return tuple(sorted(types - set(find_layer_windows(text_config))))


def find_length_limit(text_config: Any) -> LengthLimit:
    """The number of positions for which the model is exact: its position limit, or the length from which its RoPE
    depends on the whole pass."""
    limit = getattr(text_config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else None
    found = LengthLimit(limit, f"max_position_embeddings={limit}")
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    settings = [value for value in rope.values() if isinstance(value, dict)] or [rope]  # one, or one per layer type
    for setting in settings:
        rope_type = setting.get("rope_type", setting.get("type", "default"))
        if rope_type is None or ("dynamic" not in rope_type and rope_type != "longrope"):
            continue
        switch = limit
        if rope_type == "longrope":
            switch = setting.get("original_max_position_embeddings") or limit
        if switch is not None and (found.max_length is None or switch <= found.max_length):
            found = LengthLimit(
                switch,
                f"RoPE of type {rope_type!r} rescales all positions of a pass that goes beyond {switch}, so tokens "
                f"verified together would differ from tokens decoded one by one",
            )
    return found


def find_auto_class(config: Any) -> Any:
    """The class that loads a model of this config with its LM head: AutoModelForCausalLM, or another one for models
    that also read images or sounds. Models that no class knows are left to AutoModelForCausalLM."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        if type(config) in auto._model_mapping:
            return auto
    return AutoModelForCausalLM


def has_fast_bfloat16() -> bool:
    """Whether this CPU has instructions for products in bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
