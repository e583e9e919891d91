"""Configurations of draft heads: the settings of every kind, and the shape of draft decoder layers."""

import difflib
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from transformers import PreTrainedConfig

from draftsmith.inference.targets.target import Target

FORMAT_VERSION = 1
# Settings that stored configs may have, with the only value that is left.
FORMER = {"loss_decay": None, "mask_before_fc": True, "tie_lm_head": False, "use_mlp": False}
SLIDING = "sliding_attention"
LAYER_TYPES = {SLIDING, "full_attention"}
DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


class DraftHeadsConfig(PreTrainedConfig):
    """The settings that every kind of heads records about itself and about its target.

    Args:
        target_name_or_path: where the target came from. A note for people: nothing loads it.
        target_model_type: the target's `model_type`.
        target_hidden_size: the target's hidden size. This and the next two are 0 in a config without a target.
        target_vocab_size: rows of the target's LM head.
        target_num_layers: the target's number of decoder layers.
        feature_layers: tapped layers, as indices into transformers' `hidden_states` (0 = embeddings, n = post-norm).
        target_adapter: the folder, beside the heads' own files, of the adapter that the target was trained with
            (`heads.adapter`); None = the heads draft for the target without an adapter.
        format_version: version of the checkpoint layout.
        **kwargs: keys of `PreTrainedConfig`; any other key is an error.

    Raises:
        ValueError: for an unknown key (naming the nearest known one) or a newer `format_version`.
    """

    head_type: ClassVar[str] = ""
    reads_one_layer: ClassVar[bool] = False  # the last one, where `feature_layers` does not say another
    has_no_defaults_at_init = True

    target_name_or_path: str = ""
    target_model_type: str = ""
    target_hidden_size: int = 0
    target_vocab_size: int = 0
    target_num_layers: int = 0
    feature_layers: list[int] = field(default_factory=list)
    target_adapter: str | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        if (kind := kwargs.pop("head_type", self.head_type)) != self.head_type:
            raise ValueError(f"head_type is {kind!r}, but this is the config of {self.head_type} heads: leave it out")
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"these heads have format_version {self.format_version}, this release reads up to {FORMAT_VERSION}: "
                "upgrade draftsmith"
            )
        self.feature_layers, last = list(self.feature_layers), self.target_num_layers
        if last and (bad := [i for i in self.feature_layers if not 0 <= i <= last]):
            raise ValueError(
                f"feature_layers {bad} do not exist; allowed are 0 (embeddings) to {last} (after the norm)"
            )
        if len(set(self.feature_layers)) < len(self.feature_layers):
            raise ValueError(f"feature_layers {self.feature_layers} repeat a layer; give distinct ones")
        if last and self.reads_one_layer and len(self.feature_layers) != 1:
            raise ValueError(
                f"feature_layers is {self.feature_layers}; {self.head_type} heads read one layer (the last one, "
                f"{last}, in the paper): give that one, or leave it out"
            )
        kwargs = {key: value for key, value in kwargs.items() if key not in FORMER or value != FORMER[key]}
        self._refuse_unknown_keys(kwargs)
        super().__post_init__(**kwargs)

    def _refuse_unknown_keys(self, keys: dict[str, Any]) -> None:
        reserved = {
            *vars(PreTrainedConfig()),
            "dtype",
            "torch_dtype",
            "name_or_path",
            "model_type",
            "attn_implementation",
            "experts_implementation",
            "use_cache",  # transformers' Trainer sets it on the config of any model it trains
        }
        own = [key for key in vars(self) if not key.startswith("_") and key not in reserved]
        for key in keys:
            if not key.startswith("_") and key not in reserved and not hasattr(PreTrainedConfig, key):
                near = difflib.get_close_matches(key, own, n=1, cutoff=0.0)
                raise ValueError(
                    f"unknown config key {key!r} for {self.head_type or 'draft'} heads; did you mean {near[0]!r}? "
                    f"Known keys: {', '.join(sorted(own))}"
                )

    def to_dict(self) -> dict[str, Any]:
        values = {**super().to_dict(), "head_type": self.head_type}
        values.pop("use_cache", None)  # set by transformers' Trainer; heads have no such switch
        return values

    def check_range(self, name: str, least: int, most: int | None = None) -> None:
        """Raises ValueError for a setting that is neither in its range nor None."""
        if (value := getattr(self, name)) is not None and (value < least or (most is not None and value > most)):
            raise ValueError(f"{name} is {value}; allowed is {least} {'or more' if most is None else f'to {most}'}")

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        """A config for heads of this kind on `target`; kinds add their own sizes, `overrides` win."""
        values: dict[str, Any] = {
            "target_name_or_path": name_of_target(target),
            "target_model_type": target.text_config.model_type,
            "target_hidden_size": target.hidden_size,
            "target_vocab_size": target.vocab_size,
            "target_num_layers": target.num_layers,
            **({"feature_layers": [target.num_layers]} if cls.reads_one_layer else {}),
        }
        return cls(**{**values, **overrides})


def name_of_target(target: Target) -> str:
    """The target's folder or hub id; empty for a target made in memory."""
    return str(cast(Any, target.model).config._name_or_path)


def is_hub_id(name: str) -> bool:
    """Whether a name is of the hub, ORG/MODEL, and no folder here."""
    return name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not Path(name).exists()


def public_name(name: str) -> str:
    """The name of a model where it says nothing about this machine: a hub id, or the last part of a path.

    >>> public_name("meta-llama/Llama-3.1-8B-Instruct"), public_name("/home/me/targets/llama/")
    ('meta-llama/Llama-3.1-8B-Instruct', 'llama')
    """
    return name if is_hub_id(name) else Path(name).name


class DecoderConfig(DraftHeadsConfig):
    """The settings of kinds with draft decoder layers.

    Args:
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size, hidden_act, rms_norm_eps,
            rope_parameters, max_position_embeddings: the draft layers' shape; the target's by default.
        **kwargs: as in `DraftHeadsConfig`.
    """

    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 64
    intermediate_size: int = 256
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 2048

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads} and num_key_value_heads "
                f"{self.num_key_value_heads}; the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even number")
        self.rope_parameters = self.rope_parameters or dict(DEFAULT_ROPE)
        super().__post_init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        return self.target_hidden_size

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        return super().from_target(target, **{**decoder_settings(target.text_config), **overrides})


class WindowedConfig(DecoderConfig):
    """The settings of kinds whose draft layers may attend to a sliding window.

    Args:
        sliding_window: how many of the last accepted positions a layer sees; None = all. Drafted tokens come on top, so
            that the window stands still while a tree grows.
        layer_types: `sliding_attention` or `full_attention` for each draft layer; None = all layers have the window.
        **kwargs: arguments of `DecoderConfig`.
    """

    sliding_window: int | None = None
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.check_range("sliding_window", 1)
        window, types = self.sliding_window, self.layer_types or []
        if len({*types}) == 1:  # all layers are alike: the window alone says it
            if types[0] == SLIDING:
                self.layer_types = None
            elif window is None:
                types, self.layer_types = [], None
        if unknown := sorted({*types} - LAYER_TYPES):
            raise ValueError(f"layer_types has {', '.join(unknown)}; allowed are {', '.join(sorted(LAYER_TYPES))}")
        if SLIDING in types and window is None:
            raise ValueError(f"layer_types has {SLIDING}, and sliding_window is null: give the number of positions")
        if types and window is not None and SLIDING not in types:
            raise ValueError(f"sliding_window is {window}, and layer_types has no {SLIDING}: leave one of them out")
        if types and len(types) != (count := getattr(self, "num_layers", 1)):
            raise ValueError(f"layer_types has {len(types)} entries, and there are {count} draft layers: give one each")
        super().__post_init__(**kwargs)

    def window(self, layer: int) -> int | None:
        """How many of the last accepted positions a draft layer, counted from 0, sees; None = all."""
        return self.sliding_window if self.layer_types is None or self.layer_types[layer] == SLIDING else None


def decoder_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The shape that a draft decoder layer inherits from a target's (text) config, under the heads' own keys."""
    if has_attention := getattr(config, "num_attention_heads", None) is not None:
        num_heads = int(config.num_attention_heads)
    else:  # Mamba: the usual 64 channels each; its config's head_dim is another
        num_heads = max(1, int(config.hidden_size) // 64)
    head_dim = getattr(config, "head_dim", None) if has_attention else None
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if per_layer_type := [value for value in rope.values() if isinstance(value, dict)]:  # Gemma 3
        rope = rope.get("full_attention", per_layer_type[0])
    # The draft layer rotates whole heads, also where the target rotates a part of each.
    rope = {key: value for key, value in rope.items() if value is not None and key != "partial_rotary_factor"}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # Both scale by the length of the whole pass, which a slot drafted by itself does not know.
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
        "head_dim": int(head_dim or config.hidden_size // num_heads),
        "intermediate_size": int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        "hidden_act": activation,
        "rms_norm_eps": float(norm_eps),
        "rope_parameters": {**DEFAULT_ROPE, **rope},
        "max_position_embeddings": int(getattr(config, "max_position_embeddings", None) or 2048),
    }
