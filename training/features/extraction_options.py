"""The options of `draftsmith features`, and the layers that they select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from draftsmith.heads import DraftHeadsConfig
from draftsmith.heads.checkpoint import read_head_type
from draftsmith.heads.registration import find_kind
from draftsmith.inference.targets.target import Target
from draftsmith.training.data.options import DataArguments, option
from draftsmith.training.features.target_loading import load_published_heads
from draftsmith.training.features.target_options import EndpointArguments, ModelArguments, PlacementArguments


@dataclass
class ExtractionArguments(EndpointArguments):
    """Where to store, and who computes the states."""

    output_dir: str = option(help="Folder for the features.")
    batch_size: int = option(default=8, help="Rows per pass of the target.")
    shard_mb: float = option(default=512, help="Size of a shard in megabytes; memory holds three.")
    endpoint: str | None = option(
        default=None,
        help="Base URL of a vLLM server that computes the states, such as http://localhost:8000/v1; without a server, "
        "the program prints the command that starts it. The key is read from the environment variable OPENAI_API_KEY.",
    )

    def __post_init__(self) -> None:
        for name in ("batch_size", "shard_mb"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"got {name} {value}: it must be above 0")
        if self.endpoint is not None and self.batch_size != type(self).batch_size:
            raise ValueError(
                f"got batch_size {self.batch_size} with endpoint: the server makes its own batches; leave it out"
            )
        self.check_endpoint("endpoint")


def find_layers(model_args: ModelArguments, target: Target) -> Sequence[int]:
    """Returns the hidden states that the heads tap; 0 = embeddings."""
    if model_args.init_heads is not None and read_head_type(model_args.init_heads) is None:
        return load_published_heads(model_args, target).feature_layers
    if model_args.init_heads is not None:
        layers: Sequence[int] = PreTrainedConfig.get_config_dict(model_args.init_heads)[0].get("feature_layers", ())
        return layers
    assert model_args.head_type is not None
    kind: type[DraftHeadsConfig] = find_kind(model_args.head_type).config_class
    return kind.from_target(target, **model_args.parse_head_overrides()).feature_layers


# The program's options; those of NOT_FROM_FILE mean something else in a training run's --config file.
OPTION_CLASSES = (ModelArguments, DataArguments, PlacementArguments, ExtractionArguments)
NOT_FROM_FILE = ("output_dir",)
