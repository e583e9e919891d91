"""The shape of draft decoder layers: what the configs of kinds with such layers record, and inherit from the target."""

from __future__ import annotations

from typing import Any, Self

from transformers import PreTrainedConfig

from heads.config import DraftHeadsConfig
from inference.targets.target import Target

DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


class DecoderConfig(DraftHeadsConfig):
    """Args:
    num_attention_heads, num_key_value_heads, head_dim, intermediate_size, hidden_act, rms_norm_eps, rope_parameters,
    max_position_embeddings: the draft layers' shape; `from_target` takes the target's unless overridden.
    **kwargs: as in `DraftHeadsConfig`.
    """

    def __init__(
        self,
        *,
        num_attention_heads: int = 1,
        num_key_value_heads: int = 1,
        head_dim: int = 64,
        intermediate_size: int = 256,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        rope_parameters: dict[str, Any] | None = None,
        max_position_embeddings: int = 2048,
        **kwargs: Any,
    ) -> None:
        check_attention_shape(num_attention_heads, num_key_value_heads, head_dim)
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = rope_parameters or dict(DEFAULT_ROPE)
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        return self.target_hidden_size

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        return super().from_target(target, **{**decoder_settings(target.text_config), **overrides})


def check_attention_shape(num_attention_heads: int, num_key_value_heads: int, head_dim: int) -> None:
    """Raises ValueError for numbers that no attention layer can have."""
    if num_attention_heads % num_key_value_heads:
        raise ValueError(
            f"num_attention_heads is {num_attention_heads} and num_key_value_heads {num_key_value_heads}; "
            "the first must be a multiple of the second"
        )
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary positions need an even number")


def decoder_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The shape a draft decoder layer inherits from a target's (text) config: heads, head size, MLP width, activation,
    RoPE and norm settings, each under the name the heads' config uses."""
    num_heads = int(config.num_attention_heads)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if per_layer_type := [value for value in rope.values() if isinstance(value, dict)]:  # Gemma 3
        rope = rope.get("full_attention", per_layer_type[0])
    # The draft layer turns whole heads, whatever share of them the target turns.
    rope = {key: value for key, value in rope.items() if value is not None and key != "partial_rotary_factor"}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # Both scale by the length of the whole pass, which slots drafted one by one do not have.
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu"
    norm_eps = next(
        (
            value
            for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
            if (value := getattr(config, key, None))
        ),
        1e-6,
    )
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or num_heads),
        "head_dim": int(getattr(config, "head_dim", None) or config.hidden_size // num_heads),
        "intermediate_size": int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        "hidden_act": activation,
        "rms_norm_eps": float(norm_eps),
        "rope_parameters": {**DEFAULT_ROPE, **rope},
        "max_position_embeddings": int(getattr(config, "max_position_embeddings", None) or 2048),
    }
