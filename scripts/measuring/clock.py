"""The clock of all measurements."""

from __future__ import annotations

import time

import torch


def read_clock(device: torch.device) -> float:
    """Seconds, after everything sent to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
