"""A learner's folder: `learner.safetensors` (the weights in use, optimizer, counters) and `heads`, the same weights to
be loaded like any others. Both are replaced whole, so a killed process leaves the last ones.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.heads.draft_vocabulary import COUNTS
from draftsmith.training.whole_files import replacing

FILE = "learner.safetensors"
HEADS = "heads"
UNIMPORTANT = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")  # of a config
WEIGHTS, OPTIMIZER = "weights", "optimizer"  # what names in the file begin with


@dataclass(frozen=True)
class LearnerState:
    """What a learner goes on from.

    Attributes:
        in_use: the weights in use, by name.
        optimizer: its moments, by the weight's name and their own, as "fc.weight/exp_avg".
        counters: as JSON has them.
        origin: the fingerprint of the heads that learning began with.
    """

    in_use: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    counters: dict[str, Any]
    origin: str


def fingerprint(heads: DraftHeads, weights: Mapping[str, Tensor] | None = None) -> str:
    """Tells heads from others by their config, buffers and weights, as far as bfloat16 does.

    Args:
        weights: in the place of their own.
    """
    config = {name: value for name, value in heads.config.to_dict().items() if name not in UNIMPORTANT}
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    tensors = {**dict(heads.named_buffers()), **(weights or dict(heads.named_parameters()))}
    tensors.pop(COUNTS, None)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        narrow = tensor.to(torch.bfloat16).view(torch.int16) if tensor.is_floating_point() else tensor
        found.update(name.encode() + narrow.numpy().tobytes())
    return found.hexdigest()


def write_state(folder: Path, heads: DraftHeads, state: LearnerState) -> None:
    """Replaces what the folder holds.

    Args:
        heads: whose config and counts of tokens belong to the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = {"origin": state.origin, "in_use": fingerprint(heads, state.in_use)}
    metadata = {"counters": json.dumps(state.counters), **known}
    named = ((WEIGHTS, state.in_use), (OPTIMIZER, state.optimizer))
    tensors = {f"{part}/{name}": tensor.contiguous().cpu() for part, found in named for name, tensor in found.items()}
    for left in folder.glob(f".{FILE}.*"):  # by a process that was killed
        left.unlink(missing_ok=True)
    with replacing(folder / FILE) as scratch:
        save_file(tensors, scratch, metadata)
    written = copy.deepcopy(heads)
    written.write_weights(state.in_use)
    written.save_pretrained(folder / HEADS)


def read_state(folder: Path, heads: DraftHeads) -> LearnerState | None:
    """What a folder holds; None = nothing yet.

    Raises:
        ValueError: it is no folder of a learner, or of other heads.
    """
    path = folder / FILE
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder")
    if not path.exists():
        if folder.exists() and any(FILE not in file.name for file in folder.iterdir()):  # else a killed run's
            raise ValueError(f"{folder} holds other files and no {FILE}: give a new folder, or one of an earlier run")
        return None
    parts: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, OPTIMIZER: {}}
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            for name in file.keys():  # noqa: SIM118
                part, _, rest = name.partition("/")
                parts[part][rest] = file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): delete the folder, or give another one") from error
    if fingerprint(heads) not in (metadata["origin"], metadata["in_use"]):
        raise ValueError(
            f"{folder} holds what other heads than these {heads.config.head_type} heads learned: give the heads that "
            f"learned there ({folder / HEADS} has them as they are now), or another folder"
        )
    counters = json.loads(metadata["counters"])
    return LearnerState(parts[WEIGHTS], parts[OPTIMIZER], counters, metadata["origin"])
