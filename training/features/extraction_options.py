"""The options of scripts/extract_features.py, and the layers that they select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from heads import HEAD_TYPES
from heads.adapter import find_adapter_of
from inference.targets.target import Target
from training.data.options import DataArguments, option, refuse_without
from training.features.target_options import ModelArguments, PlacementArguments


@dataclass
class ExtractionArguments:
    """Where to store, and who computes the states."""

    output_dir: str = option(help="Folder for the features.")
    batch_size: int = option(default=8, help="Rows per pass of the target.")
    shard_mb: float = option(default=512, help="Size of a shard in megabytes; memory holds three.")
    endpoint: str | None = option(
        default=None,
        help="Base URL of a vLLM server that computes the states, such as http://localhost:8000/v1; without a server, "
        "the program prints the command that starts it. The key is read from the environment variable OPENAI_API_KEY.",
    )
    endpoint_model: str | None = option(
        default=None, help="The server's name for the target; none = --target as written."
    )
    concurrency: int = option(
        default=32, help="--endpoint: requests in flight per process; memory holds their texts' states."
    )
    shared_folder: str | None = option(
        default=None,
        help="Folder that the server writes to and this program reads, as this machine sees it; none = as the server "
        "names it.",
    )

    def __post_init__(self) -> None:
        for name in ("batch_size", "shard_mb", "concurrency"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"got {name} {value}: it must be above 0")
        if self.endpoint is not None and self.batch_size != type(self).batch_size:
            raise ValueError(
                f"got batch_size {self.batch_size} with endpoint: the server makes its own batches; leave it out"
            )
        refuse_without(self, "endpoint", ("endpoint_model", "concurrency", "shared_folder"))


def find_layers(model_args: ModelArguments, target: Target) -> Sequence[int]:
    """Returns the hidden states that the heads tap; 0 = embeddings."""
    if model_args.init_heads is not None:
        layers: Sequence[int] = PreTrainedConfig.get_config_dict(model_args.init_heads)[0].get("feature_layers", ())
        return layers
    assert model_args.head_type is not None
    kind = HEAD_TYPES[model_args.head_type].config_class
    return kind.from_target(target, **model_args.parse_head_overrides()).feature_layers


def refuse_without_target(model_args: ModelArguments, placement: PlacementArguments) -> None:
    """Raises ValueError for options that a server's target cannot follow."""
    if placement.target_device_map is not None:
        raise ValueError(
            f"got target_device_map {placement.target_device_map} with endpoint: the server places the target; give "
            "--target_device_map none"
        )
    if model_args.init_heads is not None and find_adapter_of(model_args.init_heads) is not None:
        raise ValueError(
            f"got endpoint with init_heads {model_args.init_heads}, which change the target with an adapter that the "
            "server does not have: leave endpoint out"
        )


# The program's options; those of NOT_FROM_FILE mean something else in a training run's --config file.
OPTION_CLASSES = (ModelArguments, DataArguments, PlacementArguments, ExtractionArguments)
NOT_FROM_FILE = ("output_dir",)
