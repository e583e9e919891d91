"""A learner's folder: `learner.json`, with the counters, and `heads`, the weights in use, to be loaded like any others.
Both are replaced whole, so a killed process leaves the last ones.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.training.whole_files import write_text

FILE = "learner.json"
HEADS = "heads"
UNIMPORTANT = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")  # of a config


@dataclass(frozen=True)
class LearnerState:
    """What a learner goes on from.

    Attributes:
        in_use: the weights in use (`DraftHeads.copy_weights`).
        counters: as JSON has them.
        origin: the fingerprint of the heads that learning began with.
    """

    in_use: Mapping[str, Tensor]
    counters: dict[str, Any]
    origin: str


def fingerprint(heads: DraftHeads) -> str:
    """Tells heads from others by their config, buffers and weights, as far as bfloat16 does."""
    config = {name: value for name, value in heads.config.to_dict().items() if name not in UNIMPORTANT}
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted([*heads.named_buffers(), *heads.named_parameters()]):
        narrow = tensor.detach().cpu().contiguous()
        if narrow.is_floating_point():
            narrow = narrow.to(torch.bfloat16).view(torch.int16)
        found.update(name.encode() + narrow.numpy().tobytes())
    return found.hexdigest()


def write_state(folder: Path, heads: DraftHeads, state: LearnerState) -> None:
    """Replaces what the folder holds.

    Args:
        heads: whose config belongs to the weights.
    """
    write_text(folder / FILE, json.dumps({"origin": state.origin, "counters": state.counters}))
    written = copy.deepcopy(heads)
    written.write_weights(state.in_use)
    written.save_pretrained(folder / HEADS)


def read_state(folder: Path, heads: DraftHeads) -> LearnerState | None:
    """What a folder holds; None = nothing yet.

    Raises:
        ValueError: it is no folder of a learner, or of other heads.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder")
    if not (folder / FILE).exists():
        if folder.exists() and any(FILE not in file.name for file in folder.iterdir()):  # else a killed run's
            raise ValueError(f"{folder} holds other files and no {FILE}: give a new folder, or one of an earlier run")
        return None
    if not (folder / HEADS / "config.json").exists():  # the process was killed when it first wrote
        return None
    known = json.loads((folder / FILE).read_text(encoding="utf-8"))
    learned = DraftHeads.from_pretrained(folder / HEADS)
    if fingerprint(heads) not in (known["origin"], fingerprint(learned)):
        raise ValueError(
            f"{folder} holds what other heads than these {heads.config.head_type} heads learned: give the heads that "
            f"learned there ({folder / HEADS} has them as they are now), or another folder"
        )
    return LearnerState(learned.copy_weights(), known["counters"], known["origin"])
