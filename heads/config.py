"""What a set of draft heads records about itself and about the target it was made for."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, Self, cast

from transformers import PreTrainedConfig

from inference.targets.target import Target

FORMAT_VERSION = 1


class DraftHeadsConfig(PreTrainedConfig):
    """What every kind of heads records about itself and the target it was made for.

    Args:
        target_name_or_path: where the target came from (a note for people; never loaded by itself).
        target_model_type: the target's `model_type`.
        target_hidden_size: the target's hidden size; 0, as in the next two, when there is no target yet.
        target_vocab_size: rows of the target's LM head.
        target_num_layers: the target's number of decoder layers.
        feature_layers: tapped layers, as indices into transformers' `hidden_states` (0 = embeddings, n = post-norm).
        target_adapter: folder, beside the heads' own files, of the adapter that the target was trained with
            (`heads.adapter`); None = they draft for the target as it is.
        format_version: version of the checkpoint layout.
        **kwargs: keys of `PreTrainedConfig`; any other key is an error.

    Raises:
        ValueError: for an unknown key (naming the nearest known one) or a newer `format_version`.
    """

    head_type: ClassVar[str] = ""
    has_no_defaults_at_init = True

    def __init__(
        self,
        *,
        target_name_or_path: str = "",
        target_model_type: str = "",
        target_hidden_size: int = 0,
        target_vocab_size: int = 0,
        target_num_layers: int = 0,
        feature_layers: tuple[int, ...] | list[int] = (),
        target_adapter: str | None = None,
        format_version: int = FORMAT_VERSION,
        **kwargs: Any,
    ) -> None:
        if (kind := kwargs.pop("head_type", self.head_type)) != self.head_type:
            raise ValueError(f"head_type is {kind!r}, but this is the config of {self.head_type} heads: leave it out")
        if format_version > FORMAT_VERSION:
            raise ValueError(
                f"these heads have format_version {format_version}, this release reads up to {FORMAT_VERSION}: "
                "upgrade draftsmith"
            )
        self.target_name_or_path = target_name_or_path
        self.target_model_type = target_model_type
        self.target_hidden_size = target_hidden_size
        self.target_vocab_size = target_vocab_size
        self.target_num_layers = target_num_layers
        self.feature_layers = list(feature_layers)
        self.target_adapter = target_adapter
        self.format_version = format_version
        if target_num_layers and (bad := [i for i in self.feature_layers if not 0 <= i <= target_num_layers]):
            raise ValueError(
                f"feature_layers {bad} do not exist; allowed are 0 (embeddings) to {target_num_layers} (after the norm)"
            )
        if len(set(self.feature_layers)) < len(self.feature_layers):
            raise ValueError(f"feature_layers {self.feature_layers} repeat a layer; give distinct ones")
        self._refuse_unknown_keys(kwargs)
        super().__init__(**kwargs)

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
        own = [key for key in vars(self) if not key.startswith("_")]
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

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        """A config for heads of this kind on `target`; kinds add their own sizes, `overrides` win."""
        values: dict[str, Any] = {
            "target_name_or_path": name_of_target(target),
            "target_model_type": target.text_config.model_type,
            "target_hidden_size": target.hidden_size,
            "target_vocab_size": target.vocab_size,
            "target_num_layers": target.num_layers,
        }
        return cls(**{**values, **overrides})


def name_of_target(target: Target) -> str:
    """Where the target came from; empty for one made in memory."""
    return str(cast(Any, target.model).config._name_or_path)
