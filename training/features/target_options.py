"""The options of the target, of the heads that are trained for it, and of its hidden states."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.heads import HEAD_TYPES
from draftsmith.heads.formats.registry import PLACES
from draftsmith.heads.registration import find_kind
from draftsmith.training.data.options import option, refuse_without, require_positive

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass
class ModelArguments:
    """The frozen target, and the heads that are trained for it."""

    target: str = option(help="The target: a folder, a hub id or a GGUF file of any stock transformers causal LM.")
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        default="auto", help="Dtype to load the target in; auto = the dtype of its saved weights."
    )
    attn_implementation: str = option(
        default="sdpa", help="The target's attention: sdpa or eager (tree masks need one of the two)."
    )
    trust_remote_code: bool = option(
        default=False, help="Run Python code that comes with the target. Read that code first."
    )
    head_type: str | None = option(
        default=None,
        help=f"Kind of heads to create: {', '.join(sorted(HEAD_TYPES))}. Not with --init_heads, except for dflash2, "
        "which may start from block heads. Without either of the two, every option that is not given is chosen "
        "(--choose).",
    )
    head_overrides: list[str] = option(
        default_factory=list,
        help="Fields of the heads' configuration: key=value with JSON values, such as num_heads=4. In YAML a mapping.",
    )
    served_by: str | None = option(
        default=None,
        aliases="--for",
        metadata={"choices": [*PLACES]},
        help=f"Where the heads will decode: {', '.join(PLACES)}. Chooses settings that can be exported there, and "
        "refuses others.",
    )
    init_heads: str | None = option(
        default=None,
        help="Instead of --head_type: start from the weights, the configuration and the draft vocabulary of trained "
        "heads (folder or hub id). They may come from another project, or from another target of the same shape, such "
        "as the one that --target was fine-tuned from. The same name as --target = the MTP modules in its checkpoint. "
        "--resume_from_checkpoint continues an interrupted run.",
    )

    def __post_init__(self) -> None:
        grows_from = None if self.head_type is None else find_kind(self.head_type).grows_from
        has_both = self.head_type is not None and self.init_heads is not None
        if (has_both and grows_from is None) or (self.head_type is None and self.init_heads is None):
            raise ValueError(
                f"got head_type={self.head_type!r} and init_heads={self.init_heads!r}: give head_type to create heads, "
                "or init_heads to continue from trained ones"
            )
        if self.init_heads is not None and self.head_overrides and not has_both:
            raise ValueError(
                f"got head_overrides {self.head_overrides} with init_heads {self.init_heads!r}: trained heads bring "
                "their configuration along; leave head_overrides out"
            )
        self.parse_head_overrides()

    def parse_head_overrides(self) -> dict[str, Any]:
        """Returns `head_overrides` as keyword arguments of `draftsmith.create_heads`."""
        return parse_overrides(self.head_overrides)


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Items key=value as a mapping; a value that is not JSON is text."""
    overrides: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not (key.isidentifier() and equals):
            raise ValueError(f"got --head_overrides {item!r}: write key=value, for example num_heads=4")
        try:
            overrides[key] = json.loads(value)
        except json.JSONDecodeError:
            overrides[key] = value
    return overrides


@dataclass
class PlacementArguments:
    """Where to keep a target that is too large for one device."""

    target_device_map: str | None = option(
        default=None,
        help="Spread the target over the devices of one process: auto, balanced, sequential, or a JSON mapping of "
        "modules to devices, cpu or disk. The token embedding must be on the heads' device.",
    )
    shard_target: Literal["none", "fsdp2"] = option(
        default="none",
        help="For large targets: fsdp2 = each process keeps a share of the layers and gathers a layer when it runs.",
    )

    def __post_init__(self) -> None:
        if self.parse_device_map() is not None and self.shard_target != "none":
            raise ValueError(
                f"got target_device_map {self.target_device_map} and shard_target {self.shard_target}: the first "
                "spreads a target over the devices of one process, the second over processes; leave one of the two out"
            )

    def parse_device_map(self) -> str | dict[str, Any] | None:
        """Returns the map as `from_pretrained` takes it."""
        value = self.target_device_map
        if value is None or value in _MAPS:
            return value
        try:
            places = json.loads(value)
        except json.JSONDecodeError:
            places = None
        if not isinstance(places, dict):
            raise ValueError(
                f"got target_device_map {value!r}: allowed are {', '.join(_MAPS)}, or a JSON mapping of module names "
                'to devices, such as {"": "cpu"}'
            )
        return places


@dataclass(kw_only=True)
class EndpointArguments:
    """A vLLM server that computes the states."""

    endpoint_model: str | None = option(
        default=None, help="The server's name for the target; none = --target as written."
    )
    concurrency: int = option(
        default=32,
        help="Texts in flight per process; their states wait on disk or in memory.",
    )
    shared_folder: str | None = option(
        default=None,
        help="Folder that the server writes to and this program reads, as this machine sees it; none = as the server "
        "names it.",
    )

    def check_endpoint(self, switch: str) -> None:
        """Raises ValueError for options of a server without `switch`, which names the server."""
        require_positive(self, ("concurrency",))
        refuse_without(self, switch, ("endpoint_model", "concurrency", "shared_folder"))


@dataclass
class FeatureArguments(EndpointArguments):
    """Where the target's states come from."""

    features: str | None = option(
        default=None,
        help="Folder of stored features (draftsmith features); none = run the target on every batch.",
    )
    features_endpoint: str | None = option(
        default=None,
        help="Base URL of a vLLM server that computes the states while the heads train, such as "
        "http://localhost:8000/v1. Only the target's embedding, final norm and LM head are loaded here.",
    )

    def __post_init__(self) -> None:
        self.check_endpoint("features_endpoint")
