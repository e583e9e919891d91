"""A learner's folder: `learner.safetensors` (the weights in use, optimizer, counters) and `heads`, the same weights to
be loaded like any others. Both are replaced whole, so a killed process leaves the last ones.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.heads import DraftHeads

FILE = "learner.safetensors"
HEADS = "heads"
WEIGHTS, OPTIMIZER = "weights", "optimizer"  # what names in the file begin with


@dataclass(frozen=True)
class LearnerState:
    """What a learner goes on from.

    Attributes:
        in_use: the weights in use, by name.
        optimizer: its moments, by the weight's name and their own, as "fc.weight/exp_avg".
        counters: as JSON has them.
    """

    in_use: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    counters: dict[str, Any]


def write_state(folder: Path, heads: DraftHeads, state: LearnerState) -> None:
    """Replaces what the folder holds.

    Args:
        heads: whose config and counts of tokens belong to the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = copy.deepcopy(heads)
    written.write_weights(state.in_use)
    written.save_pretrained(folder / HEADS)
    scratch = folder / f"{FILE}.{os.getpid()}"
    metadata = {"counters": json.dumps(state.counters), "head_type": str(heads.config.head_type)}
    named = ((WEIGHTS, state.in_use), (OPTIMIZER, state.optimizer))
    tensors = {f"{part}/{name}": tensor.contiguous().cpu() for part, found in named for name, tensor in found.items()}
    try:
        save_file(tensors, scratch, metadata)
        os.replace(scratch, folder / FILE)
    finally:
        scratch.unlink(missing_ok=True)


def read_state(folder: Path, heads: DraftHeads) -> LearnerState | None:
    """What a folder holds; None = nothing yet.

    Raises:
        ValueError: it is no folder of a learner, or of other heads.
    """
    path = folder / FILE
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds other files and no {FILE}: give a new folder, or one of an earlier run")
        return None
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        parts: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, OPTIMIZER: {}}
        for name in file.keys():  # noqa: SIM118
            part, _, rest = name.partition("/")
            parts[part][rest] = file.get_tensor(name)
    weights = parts[WEIGHTS]
    own = {name: tensor.shape for name, tensor in heads.named_parameters()}
    kind = metadata["head_type"]
    if kind != heads.config.head_type or own != {name: tensor.shape for name, tensor in weights.items()}:
        raise ValueError(
            f"{path} holds {kind} heads of another shape than these {heads.config.head_type} heads: give the heads "
            "that learned there, or another folder"
        )
    return LearnerState(weights, parts[OPTIMIZER], json.loads(metadata["counters"]))
