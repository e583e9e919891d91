"""Recognises other projects' checkpoint formats by the config, the file names and the tensor names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)
_TRAIN = "Train heads of this kind here with training/train_heads.py."


@dataclass(frozen=True)
class Clues:
    """The properties of a checkpoint that tell its format.

    Attributes:
        config: the checkpoint's, {} without one.
        file: the name of its weights file; "" when the weights do not lie in the folder.
        names: its tensors'; empty when they cannot be read.
    """

    config: dict[str, Any]
    file: str
    names: frozenset[str]

    @property
    def architectures(self) -> str:
        return " ".join(self.config.get("architectures") or ())

    def has(self, pattern: str) -> bool:
        """Whether some tensor's whole name matches."""
        return any(re.fullmatch(pattern, name) for name in self.names)


@dataclass(frozen=True)
class Format:
    """A format of other projects.

    Attributes:
        name: as in "this folder holds NAME".
        matches: whether a checkpoint has this format.
        cure: advice for the user.
    """

    name: str
    matches: Callable[[Clues], bool]
    cure: str = _TRAIN


def _is_eagle1(clues: Clues) -> bool:
    if "ForCausalLMEagle" in clues.architectures or "EagleLlama" in clues.architectures:
        return True
    if clues.names:
        return "fc.weight" in clues.names and clues.has(r"layers\.0\..*") and "lm_head.weight" not in clues.names
    # The authors' config is a Llama's of one layer.
    return clues.config.get("num_hidden_layers") == 1 and clues.architectures == "LlamaForCausalLM"


# The first that matches is named, so the special ones come first.
FORMATS = (
    Format("heads in the speculators format", lambda clues: "speculators_model_type" in clues.config),
    Format(
        "a block drafter in the published DFlash or DSpark format",
        lambda clues: re.search("DFlash|DSpark", clues.architectures, re.IGNORECASE) is not None,
    ),
    Format(
        "heads in the published EAGLE-3 format (also written by SpecForge)",
        lambda clues: (
            "Eagle3" in clues.architectures
            or clues.has(r"midlayer\..*")
            or {"fc.weight", "lm_head.weight", "norm.weight", "d2t"} <= clues.names
        ),
    ),
    Format("heads in the published EAGLE-1 or EAGLE-2 format", _is_eagle1),
    Format(
        "heads in the published Hydra format",
        lambda clues: "hydra_num_heads" in clues.config or clues.file.startswith("hydra") or clues.has(r"hydra_.*"),
    ),
    Format(
        "heads in the published Medusa format",
        lambda clues: (
            "medusa_num_heads" in clues.config
            or "MedusaModel" in clues.architectures
            or clues.file.startswith("medusa_lm_head")
            or clues.has(r"(medusa_head\..*|\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight)")
        ),
    ),
    Format(
        "a whole model, which may be a target",
        lambda clues: re.search("ForCausalLM|ForConditionalGeneration", clues.architectures) is not None,
        "Give the folder of the heads; MTP modules in a target's own checkpoint are read by "
        "heads.mtp.MTPHeads.from_target_checkpoint.",
    ),
)


def recognize(folder: Path, config: dict[str, Any]) -> Format | None:
    """The format of a checkpoint whose weights may lie in `folder`; None = unknown."""
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    clues = Clues(config, "", frozenset()) if file is None else Clues(config, file.name, _read_names(file))
    return next((known for known in FORMATS if known.matches(clues)), None)


def _read_names(file: Path) -> frozenset[str]:
    """The names of a file's tensors; none when it cannot be read. Only the header of a pickle is read."""
    try:
        if file.suffix == ".json":
            return frozenset(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                return frozenset(tensors.keys())
        return frozenset(torch.load(file, map_location="meta", mmap=True, weights_only=True))
    except (OSError, RuntimeError, SafetensorError, ValueError, KeyError, TypeError, UnpicklingError):
        return frozenset()
