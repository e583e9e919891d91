"""The clock of all measurements."""

from __future__ import annotations

import time

import torch


def read_clock(device: torch.device) -> float:
    """Seconds, after the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


class TimeLimit:
    """The time that a piece of work may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, 0 at least."""
        return max(0.0, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left == 0

    def part(self, seconds: float) -> TimeLimit:
        """The limit of a part of the work: so many seconds, or what is left."""
        return TimeLimit(min(seconds, self.left))
