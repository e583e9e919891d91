"""Which checkpoint a run goes on from: the newest one that was written to its end."""

from __future__ import annotations

import json
import logging
import re
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

# The files Trainer cannot go on without, in the order in which it writes them.
_NEEDED = ("config.json", "model.safetensors", "trainer_state.json")


def find_checkpoint(output_dir: str, wanted: Any, *, is_main_process: bool = True) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint WANTED` asks for; None = start from the beginning.

    Args:
        wanted: None or false; true = the newest complete checkpoint in `output_dir`; else a folder.
        is_main_process: whether to warn about checkpoints that are passed over.

    Raises:
        ValueError: when the folder asked for is missing or incomplete.
    """
    folders = sorted(Path(output_dir).glob("checkpoint-*"), key=_step, reverse=True)
    if wanted is None or str(wanted).lower() in ("false", ""):
        if folders and is_main_process:
            logger.warning(
                "%s has checkpoints of an earlier run, up to %s: a later --resume_from_checkpoint true would take them "
                "for this run's; train in another output_dir, or remove them",
                output_dir,
                folders[0].name,
            )
        return None
    if str(wanted).lower() != "true":
        folder = Path(wanted)
        if damage := find_damage(folder):
            raise ValueError(
                f"cannot resume from {folder}: {damage}; give a complete checkpoint, or true for the newest one"
            )
        return folder
    for folder in folders:
        damage = find_damage(folder)
        if damage is None:
            return folder
        if is_main_process:
            logger.warning("%s is passed over: %s", folder, damage)
    if is_main_process:
        logger.warning("no complete checkpoint in %s: starting from the beginning", output_dir)
    return None


def find_damage(folder: Path) -> str | None:
    """What a kill or a full disk left undone in a checkpoint of Trainer's, or None when it is complete.

    Trainer writes `trainer_state.json` last, so that a checkpoint with a whole one is complete; the other files are
    looked at too, for copies that broke off.
    """
    for name in _NEEDED:
        if not (folder / name).is_file():
            return f"{name} is missing"
    for file in sorted(folder.iterdir()):
        if file.suffix == ".json":
            try:
                json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                return f"{file.name} is cut off"
        elif file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt"):
                    pass
            except SafetensorError:
                return f"{file.name} is cut off"
        elif file.suffix in (".pt", ".pth") and not zipfile.is_zipfile(file):  # what torch.save writes
            return f"{file.name} is cut off"
    # DeepSpeed and FSDP keep the optimizer in folders.
    if not (folder / "optimizer.pt").is_file() and not any(file.is_dir() for file in folder.iterdir()):
        return "optimizer.pt is missing (with save_only_model there is nothing to resume from)"
    return None


def check_same_heads(folder: Path, stored: PreTrainedConfig, wanted: PreTrainedConfig) -> None:
    """Refuses to resume with other heads than were being trained.

    Raises:
        ValueError: naming the keys that differ, and both values.
    """
    notes = ("target_name_or_path", "_name_or_path", "architectures", "dtype", "transformers_version")
    one, other = ({**config.to_dict(), **dict.fromkeys(notes)} for config in (stored, wanted))
    different = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    if different:
        found = ", ".join(f"{key} {one.get(key)!r} (now {other.get(key)!r})" for key in different)
        raise ValueError(
            f"{folder} holds heads with {found}: resume with the same options, or train in another output_dir"
        )


def _step(folder: Path) -> int:
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else -1
