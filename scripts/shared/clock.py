"""The clock of all measurements."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

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


class TimeIsUp(BaseException):
    """Work was cut off. No error, so that nothing on the way takes it for one."""


@contextmanager
def cut_off_after(seconds: float) -> Iterator[None]:
    """Raises `TimeIsUp` in the block when it has run so long: in a process's main thread, where there are alarms."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> NoReturn:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
