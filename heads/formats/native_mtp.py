"""MTP modules in a target's own checkpoint, read for `draftsmith.heads.kinds.mtp`.

transformers leaves these tensors out when it loads the target. Checkpoints use three sets of names. Serving engines and
transformers agree on the conventions, with one exception: only the engines zero the embedding of position 0.

    DeepSeek-V3, GLM-4-MoE   model.layers.{n + i}.{enorm, hnorm, eh_proj, shared_head.norm, the layer's own}
    Qwen3-Next and later     mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.0.{the layer's own}
    MiMo                     model.mtp_layers.{i}.{token_layernorm, hidden_layernorm, input_proj, final_layernorm, ...}

The decoder layer of a module is the target family's own class (`heads/modules/stock_layer.py`). One module becomes a
shared block, which a tree applies at every depth; several modules become a block for each depth.
"""

import copy
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftsmith.heads.formats.format import Imported
from draftsmith.heads.formats.published import find_file, open_safetensors, read_index
from draftsmith.heads.modules.stock_layer import find_family
from draftsmith.inference.targets.files import is_gguf
from draftsmith.inference.targets.target import Target

# FastMTP (arXiv 2509.18362) fine-tunes a native module with three applications.
DEFAULT_NUM_STEPS = 3
OUTER_NORM = re.compile(r"blocks\.\d+\.(enorm|hnorm|norm)\.weight")
_BORROWED = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")  # the target has them itself
# Families that transformers does not have, and whose layers they use.
_LAYERS_OF = {"mimo": "qwen2"}
_QUANTIZED = ("_scale", "_scale_inv", ".qweight")  # ends of names beside quantized weights
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class Naming:
    """How one family names its MTP tensors.

    Attributes:
        layer: matches a tensor of module `index`, with `rest` for the part after the prefix.
        prefix: what new checkpoints have before that part, with {} for the number.
        parts: the family's name of a part after the prefix -> ours.
        top: names without an index, of a single module -> ours.
        settings: keys of `MTPConfig` for this family's modules.
    """

    layer: str
    prefix: str
    parts: dict[str, str]
    settings: dict[str, Any]
    top: dict[str, str] = field(default_factory=dict)

    def place(self, name: str, num_layers: int) -> tuple[int, str] | None:
        """(module, name in our block) of a checkpoint's tensor, "" for a copy of the target's; None if it is not of an
        MTP module."""
        if name in self.top:
            return 0, self.top[name]
        match = re.fullmatch(self.layer, name)
        if match is None or (index := int(match["index"]) - (num_layers if self is DEEPSEEK else 0)) < 0:
            return None
        rest = match["rest"]
        return index, "" if rest in _BORROWED else self.parts.get(rest, f"layer.layer.{rest}")

    def name(self, index: int, ours: str, num_layers: int) -> str:
        """The inverse of `place`: the checkpoint's name of a part of module `index`."""
        for theirs, known in self.top.items():
            if known == ours:
                return theirs
        rest = next((theirs for theirs, known in self.parts.items() if known == ours), None)
        return self.prefix.format(num_layers + index if self is DEEPSEEK else index) + (
            rest or ours.removeprefix("layer.layer.")
        )


DEEPSEEK = Naming(
    layer=r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(?P<index>\d+)\.(?P<rest>.+)",
    prefix="model.layers.{}.",
    parts={
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "eh_proj.weight": "eh_proj.weight",
        "shared_head.norm.weight": "norm.weight",
    },
    settings={"norm_output": True, "hidden_first": False, "zero_first_embedding": True},
)
QWEN = Naming(
    layer=r"mtp\.layers\.(?P<index>\d+)\.(?P<rest>.+)",
    prefix="mtp.layers.{}.",
    parts={},
    settings={"norm_output": True, "hidden_first": False, "zero_first_embedding": False},
    top={
        "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
        "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
        "mtp.fc.weight": "eh_proj.weight",
        "mtp.norm.weight": "norm.weight",
    },
)
MIMO = Naming(
    layer=r"model\.mtp_layers\.(?P<index>\d+)\.(?P<rest>.+)",
    prefix="model.mtp_layers.{}.",
    parts={
        "token_layernorm.weight": "enorm.weight",
        "hidden_layernorm.weight": "hnorm.weight",
        "input_proj.weight": "eh_proj.weight",
        "final_layernorm.weight": "norm.weight",
    },
    settings={
        "norm_output": True,
        "hidden_first": True,
        "zero_first_embedding": True,
        "reads_before_final_norm": True,
    },
)


def read_native_modules(path: str, target: Target, **hub: Any) -> Imported:
    """Reads the MTP modules from the target's checkpoint, a folder or a hub id. Outer norms come in float32.

    Raises:
        ValueError: there is no MTP module, or one that cannot be used, with the reason.
    """
    files = find_tensors(path, **hub)
    naming, places = _find_modules(path, files, target.num_layers)
    num_blocks = 1 + max(index for index, _ in places.values())
    settings = {
        **naming.settings,
        "share_block": num_blocks == 1,
        "num_steps": DEFAULT_NUM_STEPS if num_blocks == 1 else num_blocks,
        "stock_layer": _describe_layers(target, num_blocks, [name for _, name in places.values()]),
    }
    try:
        offset = find_family(settings["stock_layer"]).norm_offset
    except ValueError as error:
        raise ValueError(f"the MTP modules of {path} cannot be used: {error}") from error
    tensors = _read(path, files, places, hub)
    for name, tensor in tensors.items():
        if OUTER_NORM.fullmatch(name):  # norms outside the layer are ours, which multiply by their weight only
            tensors[name] = tensor.float() + offset
    if settings.get("reads_before_final_norm"):
        tensors["state_gain"] = find_state_gain(target)
    return Imported("mtp", settings, _merge_experts(tensors))


def find_state_gain(target: Target) -> Tensor:
    """[D], the gain of the target's final norm, by which states after that norm are divided."""
    if (gain := target.final_norm_gain()) is None or not gain.all():
        raise ValueError(
            "reads_before_final_norm needs a target with a final norm whose gain is nowhere zero, and this target's "
            "is not: set it to false"
        )
    return gain


@dataclass(frozen=True)
class FoundModules:
    """What the names of a checkpoint's tensors tell. count: MTP modules, 0 = none."""

    kind: ClassVar[str] = "mtp"

    count: int
    is_quantized: bool = False


def find_modules(path: str, num_layers: int) -> FoundModules:
    """The MTP modules in the checkpoint of a target with `num_layers` layers; no tensor is read."""
    if is_gguf(path):
        return FoundModules(0)
    try:
        files = find_tensors(path)
        _, places = _find_modules(path, files, num_layers)
    except ValueError:
        return FoundModules(0)
    is_quantized = any(name.endswith(_QUANTIZED) for name in places)
    return FoundModules(1 + max(index for index, _ in places.values()), is_quantized)


def find_tensors(path: str, **hub: Any) -> dict[str, str]:
    """Each tensor's name and the file that holds it."""
    if (index := find_file(path, "model.safetensors.index.json", **hub)) is not None:
        return read_index(path, index)
    if (single := find_file(path, "model.safetensors", **hub)) is None:
        raise ValueError(
            f"{path} has no model.safetensors and no model.safetensors.index.json: give the target's own checkpoint, "
            "a directory or a hub id, in safetensors"
        )
    with open_safetensors(path, single) as file:
        return dict.fromkeys(file.keys(), "model.safetensors")


def _find_modules(path: str, names: Iterable[str], num_layers: int) -> tuple[Naming, dict[str, tuple[int, str]]]:
    """The checkpoint's naming, and the place in our heads of every tensor of an MTP module."""
    for naming in (DEEPSEEK, QWEN, MIMO):
        found = {name: place for name in names if (place := naming.place(name, num_layers)) is not None}
        places = {name: place for name, place in found.items() if place[1]}
        if any(ours == "eh_proj.weight" for _, ours in places.values()):
            return naming, places
    raise ValueError(
        f"{path} holds no MTP module: neither model.layers.{num_layers}.eh_proj (DeepSeek-V3, GLM-4-MoE) nor mtp.fc "
        "(Qwen3-Next) nor model.mtp_layers.0.input_proj (MiMo). Many conversions drop these tensors: use the original "
        "checkpoint, or train heads (head_type: mtp)"
    )


def _describe_layers(target: Target, num_blocks: int, names: list[str]) -> dict[str, Any]:
    """The target's text config, with settings per layer that describe its MTP layers."""
    config = copy.deepcopy(target.text_config)
    has_experts = any(".experts." in name for name in names)
    config.num_hidden_layers = num_blocks
    if getattr(config, "layer_types", None):
        config.layer_types = getattr(config, "mtp_layer_types", None) or ["full_attention"] * num_blocks
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["sparse" if has_experts else "dense"] * num_blocks
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0 if has_experts else num_blocks
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers = [] if has_experts else list(range(num_blocks))
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    settings["model_type"] = _LAYERS_OF.get(config.model_type, config.model_type)
    settings.pop("quantization_config", None)  # the target's; its MTP tensors are read as they are
    return settings


def _read(
    path: str, files: dict[str, str], places: dict[str, tuple[int, str]], hub: dict[str, Any]
) -> dict[str, Tensor]:
    tensors = {}
    for file_name in sorted({files[name] for name in places}):
        if (file_path := find_file(path, file_name, **hub)) is None:
            raise ValueError(f"{path}: the index names the file {file_name}, which is not there: copy it again")
        with open_safetensors(path, file_path) as file:
            for name, (index, ours) in places.items():
                if files[name] == file_name:
                    tensors[f"blocks.{index}.{ours}"] = file.get_tensor(name)
    quantized = sorted(name for name, x in tensors.items() if name.endswith(_QUANTIZED) or x.element_size() == 1)
    if quantized:
        raise ValueError(
            f"{path}: the MTP tensors are quantized ({quantized[0]} and {len(quantized) - 1} more): take a checkpoint "
            "in bfloat16, or convert it first"
        )
    return tensors


def _merge_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joins the matrices of single experts, as in checkpoints, into transformers' stacks: gate_up_proj [experts, 2I, D]
    and down_proj [experts, D, I]."""
    merged: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[str, int], Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := _EXPERT.fullmatch(name)) is None:
            merged[name] = tensor
        else:
            experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
    for prefix, matrices in experts.items():
        numbers = sorted({number for _, number in matrices})
        if len(matrices) != 3 * len(numbers) or numbers != list(range(len(numbers))):
            raise ValueError(f"the checkpoint lacks matrices of some experts of {prefix}: copy it again")
        gate_up = [torch.cat([matrices["gate_proj", n], matrices["up_proj", n]]) for n in numbers]
        merged[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        merged[f"{prefix}.down_proj"] = torch.stack([matrices["down_proj", n] for n in numbers])
    return merged
