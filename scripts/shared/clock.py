"""The clock of all measurements."""

from __future__ import annotations

import time

import torch


def read_clock(device: torch.device) -> float:
    """Seconds, after the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
