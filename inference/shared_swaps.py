"""SharedSwap: something that is replaced for the whole process while any thread needs it so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import ClassVar


class SharedSwap:
    """A context. The first thread that enters replaces something, and the last one that leaves puts it back.

    Threads that each saved and restored would leave the replacement behind when they overlap: the second one saves what
    the first has put there.

    Args:
        key: of what is replaced. All swaps of one key are equal.
        replace: replaces it, and returns the function that puts it back.
    """

    _lock: ClassVar = threading.Lock()
    _inside: ClassVar[dict[Hashable, tuple[int, Callable[[], None]]]] = {}  # how many, and what the last one calls

    def __init__(self, key: Hashable, replace: Callable[[], Callable[[], None]]) -> None:
        self.key, self.replace = key, replace

    def __enter__(self) -> None:
        with self._lock:
            if self.key in self._inside:
                count, restore = self._inside[self.key]
            else:
                count, restore = 0, self.replace()
            self._inside[self.key] = count + 1, restore

    def __exit__(self, *_: object) -> None:
        with self._lock:
            count, restore = self._inside.pop(self.key)
            if count > 1:
                self._inside[self.key] = count - 1, restore
            else:
                restore()
