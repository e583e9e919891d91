"""Programs with --distributed: rank 0 runs the program, and every other rank serves the target to it."""

from __future__ import annotations

import os

import torch

from draftsmith.inference import serve_target
from draftsmith.scripts.shared.model_loading import load_target


def read_rank(program: str) -> int:
    """This process's rank.

    Args:
        program: its name as `draftsmith` knows it, for the error.

    Raises:
        ValueError: there is only this process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ValueError(
            "got --distributed in a single process: one process drafts, and all others serve the target, so start "
            f"torchrun --nproc_per_node 2 -m draftsmith {program} with the same options"
        )
    return int(os.environ["RANK"])


def choose_device(device: str | None) -> str | None:
    """The device of this rank: without a name, the GPU of its number on this machine."""
    if device is None and torch.cuda.is_available():
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    return device


def serve_rank(target: str, *, dtype: str, device: str | None) -> None:
    """Serves the target until rank 0 ends."""
    serve_target(load_target(target, dtype=dtype, device=choose_device(device))[0])
