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
    """Work was cut off. A BaseException, so that no `except Exception` catches it."""


@contextmanager
def cut_off_after(seconds: float) -> Iterator[None]:
    """Raises `TimeIsUp` in the block after so many seconds. Only in the main thread of a system with alarms; elsewhere
    it does nothing."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> NoReturn:
        raise TimeIsUp

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, ring)
    # Again after a second, if the exception was raised where Python drops exceptions.
    timer, interval = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if timer:  # somebody else's
            signal.setitimer(signal.ITIMER_REAL, max(timer - (time.monotonic() - start), 1e-3), interval)
