"""The options of scripts/extract_features.py, and the layers and tensors that they select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from heads import HEAD_TYPES
from inference.targets.target import Target
from training.data.options import DataArguments, option
from training.features.store import tensor_name
from training.features.target_options import ModelArguments, PlacementArguments


@dataclass
class ExtractedModelArguments(ModelArguments):
    """The target, and the heads whose tapped layers are stored; without heads, only those of --feature_layers."""

    def __post_init__(self) -> None:
        if self.head_type is not None or self.init_heads is not None:
            super().__post_init__()


@dataclass
class ExtractionArguments:
    """What to store, and where."""

    output_dir: str = option(help="Folder for the features.")
    feature_layers: list[int] = option(
        default_factory=list,
        help="Hidden states to store (0 = embeddings), besides those of --head_type and the last one.",
    )
    store_last_hidden: bool = option(
        default=True, help="Store the last state. Without it, give --teacher_top_k; heads that tap it cannot train."
    )
    teacher_top_k: int | None = option(
        default=None,
        help="Store the N largest logits of the target per token as the teacher, and the log-sum-exp of all; "
        "none = compute the teacher from the last state.",
    )
    batch_size: int = option(default=8, help="Rows per pass of the target.")
    shard_mb: float = option(default=512, help="Size of a shard in megabytes; memory holds two.")

    def __post_init__(self) -> None:
        for name in ("teacher_top_k", "batch_size", "shard_mb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"got {name} {value}: it must be above 0")
        if not self.store_last_hidden and self.teacher_top_k is None:
            raise ValueError(
                "got store_last_hidden false without teacher_top_k: there would be no teacher; give --teacher_top_k, "
                "for example 64"
            )


def choose_layers(model_args: ModelArguments, args: ExtractionArguments, target: Target) -> list[int]:
    """Returns the hidden states to store, in rising order, without the last.

    Raises:
        ValueError: a state that the target does not have, or the last one when it is not to be stored.
    """
    layers = set(args.feature_layers)
    if model_args.init_heads is not None:
        layers |= set(PreTrainedConfig.get_config_dict(model_args.init_heads)[0].get("feature_layers", ()))
    elif model_args.head_type is not None:
        if model_args.head_type not in HEAD_TYPES:
            raise ValueError(f"got head_type {model_args.head_type!r}; allowed are {', '.join(sorted(HEAD_TYPES))}")
        kind = HEAD_TYPES[model_args.head_type].config_class
        layers |= set(kind.from_target(target, **model_args.parse_head_overrides()).feature_layers)
    unknown = sorted(layer for layer in layers if not 0 <= layer <= target.num_layers)
    if unknown:
        raise ValueError(f"got feature layers {unknown}: the target has 0 (embeddings) to {target.num_layers} (last)")
    if target.num_layers in layers and not args.store_last_hidden:
        raise ValueError(
            f"got store_last_hidden false, and layer {target.num_layers} is the last state, which these heads read: "
            "leave one of them out"
        )
    return sorted(layers - {target.num_layers})


def plan_tensors(layers: Sequence[int], args: ExtractionArguments, num_layers: int) -> list[str]:
    """Returns the names of the tensors to store."""
    tensors = [tensor_name(layer, num_layers) for layer in layers]
    tensors += ["last"] if args.store_last_hidden else []
    tensors += ["top.values", "top.token_ids", "top.log_sum_exp"] if args.teacher_top_k is not None else []
    return sorted(tensors)


# The program's options; those of NOT_FROM_FILE mean something else in a training run's --config file.
OPTION_CLASSES = (ExtractedModelArguments, DataArguments, PlacementArguments, ExtractionArguments)
NOT_FROM_FILE = ("output_dir",)
