"""SharedSwap: an attribute that is replaced for the whole process while any thread needs it so."""

import threading
from typing import Any, ClassVar


class SharedSwap:
    """A context. The first thread that enters replaces an attribute, and the last one that leaves puts it back.

    Threads that each saved and restored would leave the replacement behind when they overlap: the second one saves what
    the first has put there.

    Args:
        owner: of the attribute, such as a module. All swaps of one attribute have equal values.
    """

    _lock: ClassVar = threading.Lock()
    # By owner and name: how many are inside, and the attribute before, if the owner had one of its own.
    _inside: ClassVar[dict[tuple[int, str], tuple[int, list[Any]]]] = {}

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value
        self._key = (id(owner), name)

    def __enter__(self) -> None:
        with self._lock:
            if self._key in self._inside:
                count, before = self._inside[self._key]
            else:
                count, before = 0, [vars(self.owner)[self.name]] if self.name in vars(self.owner) else []
                setattr(self.owner, self.name, self.value)
            self._inside[self._key] = count + 1, before

    def __exit__(self, *_: object) -> None:
        with self._lock:
            count, before = self._inside.pop(self._key)
            if count > 1:
                self._inside[self._key] = count - 1, before
            elif before:
                setattr(self.owner, self.name, before[0])
            else:
                delattr(self.owner, self.name)
