"""A GGUF file's metadata while it is read: values of the right types, and what nobody asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Allowed:
    """What a value may be: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


SIZE = Allowed("a positive whole number", lambda value: _is_integer(value) and value > 0)
INDEX = Allowed("a whole number from 0 on", lambda value: _is_integer(value) and value >= 0)
NUMBER = Allowed("a positive number", lambda value: (_is_integer(value) or isinstance(value, float)) and value > 0)
FLAG = Allowed("true or false", lambda value: isinstance(value, bool))
LAYERS = Allowed("a list of layers", lambda value: isinstance(value, list) and all(map(_is_integer, value)))


class Keys:
    """The keys of one architecture.

    Args:
        metadata: all of the file's.
        prefix: of the architecture's keys.
        problems: what is wrong with them is added, one sentence each.
    """

    def __init__(self, metadata: dict[str, Any], prefix: str, problems: list[str] | None = None) -> None:
        self.metadata, self.prefix = metadata, prefix
        self.problems: list[str] = [] if problems is None else problems
        self._asked: set[str] = set()

    def get(self, key: str, otherwise: Any = None, *, allowed: Allowed | None = None) -> Any:
        """The value of a key; `otherwise` if there is none, or one of another type."""
        name = self.prefix + key
        self._asked.add(name)
        value = _round(self.metadata.get(name))
        if value is None:
            return otherwise
        if allowed is not None and not allowed.holds(value):
            self.problems.append(f"{name} is {value!r}, and should be {allowed.words}")
            return otherwise
        return value

    def need(self, *names: str, allowed: Allowed) -> Any:
        """The value under the first of these names that there is; None is a problem."""
        if not any(self.prefix + name in self.metadata for name in names):
            self.problems.append(f"the metadata has no {' or '.join(self.prefix + name for name in names)}")
        found = [value for name in names if (value := self.get(name, allowed=allowed)) is not None]
        if any(value != found[0] for value in found):
            told = " and ".join(f"{self.prefix}{name} {self.metadata[self.prefix + name]}" for name in names)
            self.problems.append(f"{told} contradict each other")
        return found[0] if found else None

    def expect(self, key: str, wanted: Any, *, may_lack: bool = False) -> None:
        """A key with one value that is read."""
        if (value := self.get(key)) != wanted and not (value is None and may_lack):
            self.problems.append(f"{self.prefix}{key} is {value!r}, and {wanted!r} is read here")

    def refuse_unread(self) -> None:
        """Every other key of the architecture may change what its graph computes."""
        if unread := sorted(x for x in self.metadata if x.startswith(self.prefix) and x not in self._asked):
            self.problems.append(
                f"the metadata has keys that heads here do not know, and that may change what they compute: "
                f"{', '.join(unread)}"
            )


def _round(value: Any) -> Any:
    """1e-6 is not quite 1e-6 after it was stored in float32."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
