"""What scripts/extract_features.py is asked for: options, the layers they name, and the tensors these become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformers import PreTrainedConfig

from heads import HEAD_TYPES
from inference.targets.target import Target
from training.data.options import DataArguments
from training.features.options import name_tensors
from training.features.target_options import ModelArguments, PlacementArguments


@dataclass
class ExtractedModelArguments(ModelArguments):
    """The target, and the heads whose tapped layers are stored; none = those of --feature_layers alone."""

    def __post_init__(self) -> None:
        if self.head_type is not None or self.init_heads is not None:
            super().__post_init__()


@dataclass
class ExtractionArguments:
    """What is stored, and where."""

    output_dir: str = field(metadata={"help": "Folder for the features."})
    feature_layers: list[int] = field(
        default_factory=list,
        metadata={"help": "Hidden states to store (0 = embeddings), besides those of --head_type and the last one."},
    )
    features_dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "Dtype of stored states; auto = the target's, which loses nothing."}
    )
    last_state: Literal["post-norm", "pre-norm"] = field(
        default="post-norm",
        metadata={
            "help": "Store the last state behind the final norm, or before it: the norm is then applied on loading."
        },
    )
    store_last_hidden: bool = field(
        default=True,
        metadata={
            "help": "Store the last state; without it --teacher_top_k is needed, and heads that tap it cannot train."
        },
    )
    teacher_top_k: int | None = field(
        default=None,
        metadata={
            "help": "Store the target's so many largest logits per token and the log-sum-exp of all, which are then "
            "the teacher; none = it is computed from the last state."
        },
    )
    batch_size: int = field(default=8, metadata={"help": "Rows per pass of the target."})
    shard_mb: float = field(default=512, metadata={"help": "Size of a shard in megabytes; memory holds two."})
    max_disk_gb: float | None = field(
        default=None, metadata={"help": "Gigabytes that may be written; none = what is free on that disk."}
    )

    def __post_init__(self) -> None:
        for name in ("teacher_top_k", "batch_size", "shard_mb", "max_disk_gb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"got {name} {value}: it must be above 0")
        if not self.store_last_hidden and self.last_state != "post-norm":
            raise ValueError(
                f"got store_last_hidden false and last_state {self.last_state!r}: a state that is not stored has no "
                "place; leave one of the two out"
            )
        if not self.store_last_hidden and self.teacher_top_k is None:
            raise ValueError(
                "got store_last_hidden false without teacher_top_k: nothing would be left to teach from; give "
                "--teacher_top_k, for example 64"
            )


def choose_layers(model_args: ModelArguments, args: ExtractionArguments, target: Target) -> list[int]:
    """The hidden states that are stored, rising, without the last.

    Raises:
        ValueError: a state that the target does not have, or the last one in demand and left out.
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
            f"got store_last_hidden false, and layer {target.num_layers} is the last state: leave one of them out "
            "(these heads read it)"
        )
    return sorted(layers - {target.num_layers})


def plan_tensors(layers: Sequence[int], args: ExtractionArguments, num_layers: int) -> dict[str, str]:
    tensors = name_tensors(layers, num_layers)
    if args.store_last_hidden:
        tensors["last"] = args.last_state
    if args.teacher_top_k is not None:
        tensors |= {"top.values": "logits", "top.token_ids": "ids", "top.log_sum_exp": "logits"}
    return tensors


# The options of scripts/extract_features.py, and those that it does not take from a training run's --config file.
OPTION_CLASSES = (ExtractedModelArguments, DataArguments, PlacementArguments, ExtractionArguments)
NOT_FROM_FILE = ("output_dir", "max_disk_gb")
