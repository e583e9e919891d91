"""Takes the arguments of a call apart: tensors, and everything else, which a captured graph holds as a constant.

A graph reads the memory that it was captured with. Two calls may share a graph if they differ in the values of tensors
only. `Parts.signature` holds all the rest: shapes, numbers, classes, and which objects occur twice.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from draftsmith.inference.targets.target import Target

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
# Taken as they are. A graph holds their weights and settings, as compiled graphs do.
_WHOLE = (nn.Module, Target, PreTrainedConfig, type, types.FunctionType, types.BuiltinFunctionType)


class NotCapturableError(Exception):
    """A graph cannot hold a function."""


class _Unreadable:
    """In the place of a host number that changes from step to step (`host_numbers` of its class)."""

    def _refuse(self, *_: object) -> NoReturn:
        raise NotCapturableError("it computes with a number of the host that changes from step to step")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __index__ = __int__ = __float__ = __bool__ = _refuse


UNREADABLE = _Unreadable()


@dataclass
class Parts:
    """What a value consists of.

    Attributes:
        tensors: each tensor once, in the order in which they are met.
        holders: for each tensor, the (object, name) pairs that hold it, of objects, dictionaries and lists.
        paths: for each tensor, where it was first met: the class of the outermost object, then names.
        roots: for each tensor, that outermost object.
        objects: objects and dictionaries, each once; functions may set their attributes.
        lists: functions must not change them.
        signature: everything else.
        closed: the class of an object that does not show its attributes (`__slots__`); None = there is none.
    """

    value: Any
    tensors: list[Tensor] = field(default_factory=list)
    holders: list[list[tuple[Any, Any]]] = field(default_factory=list)
    paths: list[tuple[Any, ...]] = field(default_factory=list)
    roots: list[Any] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    lists: list[list[Any]] = field(default_factory=list)
    signature: tuple[Any, ...] = ()
    closed: str | None = None
    whole: list[Any] = field(default_factory=list)  # held, because the signature has their ids
    _seen: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Parts:
        parts = cls(value)
        parts.signature = parts._visit(value, (), None, None)
        return parts

    def _visit(self, value: Any, path: tuple[Any, ...], root: Any, holder: tuple[Any, Any] | None) -> tuple[Any, ...]:
        if isinstance(value, _CONSTANTS):
            return type(value), value
        if id(value) in self._seen:
            if isinstance(value, Tensor) and holder is not None:
                self.holders[self._seen[id(value)][1]].append(holder)
            return self._seen[id(value)]
        if isinstance(value, Tensor):
            self._seen[id(value)] = ("tensor", len(self.tensors))
            self.tensors.append(value)
            self.holders.append([] if holder is None else [holder])
            self.paths.append(path)
            self.roots.append(root)
            return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(value)
        if isinstance(value, (tuple, list)):
            if isinstance(value, list):
                self.lists.append(value)
            return (
                type(value),
                *(
                    self._visit(child, (*path, place), root, (value, place) if isinstance(value, list) else None)
                    for place, child in enumerate(value)
                ),
            )
        entries = entries_of(value)
        if entries is None:
            if not isinstance(value, _WHOLE):
                self.closed = type(value).__name__
            self.whole.append(value)
            return "whole", id(value)
        if isinstance(value, (types.MethodType, functools.partial)):
            return (type(value), *(self._visit(child, (*path, name), root, None) for name, child in entries.items()))
        self._seen[id(value)] = ("object", len(self.objects))
        self.objects.append(value)
        if root is None and not isinstance(value, dict):
            root, path = value, (type(value),)
        hidden, fixed = getattr(value, "host_numbers", ()), getattr(value, "fixed_entries", ())
        found: list[Any] = [type(value)]
        for name, child in entries.items():
            if name in fixed:
                self.whole.append(child)
                found.append((name, id(child)))
            elif name not in hidden:
                found.append((name, self._visit(child, (*path, name), root, (value, name))))
        return tuple(found)


def entries_of(value: Any) -> dict[Any, Any] | None:
    """The names and values that an object consists of; None for what is taken whole."""
    if isinstance(value, dict):
        return value
    if isinstance(value, types.MethodType):
        return {"function": value.__func__, "self": value.__self__}
    if isinstance(value, functools.partial):
        return {"function": value.func, "args": value.args, "keywords": value.keywords}
    return None if isinstance(value, _WHOLE) or not hasattr(value, "__dict__") else vars(value)


def rebuild(value: Any, replace: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """A copy of the value with other tensors.

    Args:
        replace: the new tensor of each tensor.
        memo: the copy of each object by the object's id; those in it already are not copied.
    """
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, (tuple, list)):
        items = [rebuild(item, replace, memo) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    entries = entries_of(value)
    if entries is None or isinstance(value, _CONSTANTS):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, rebuild(value.__self__, replace, memo))
    if isinstance(value, functools.partial):
        arguments = rebuild((value.args, value.keywords), replace, memo)
        return functools.partial(value.func, *arguments[0], **arguments[1])
    copied = {} if isinstance(value, dict) else object.__new__(type(value))
    memo[id(value)] = copied
    names, fixed = entries_of(copied), getattr(value, "fixed_entries", ())
    assert names is not None
    for name, child in entries.items():
        names[name] = child if name in fixed else rebuild(child, replace, memo)
    return copied


def hide_host_numbers(objects: Sequence[Any]) -> None:
    """Makes the numbers unreadable that are not in a signature."""
    for one in objects:
        for name in getattr(one, "host_numbers", ()):
            vars(one)[name] = UNREADABLE


class Snapshot:
    """The attributes of objects at one moment."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = objects
        self._before = [dict(entries_of(one) or {}) for one in objects]

    def changes(self) -> list[tuple[int, Any, Any]]:
        """(number of the object, name, new value) of everything that was set since."""
        return [
            (number, name, value)
            for number, (one, before) in enumerate(zip(self.objects, self._before, strict=True))
            for name, value in (entries_of(one) or {}).items()
            if name not in before or before[name] is not value
        ]

    def restore(self) -> None:
        for one, before in zip(self.objects, self._before, strict=True):
            entries = entries_of(one)
            assert entries is not None
            entries.clear()
            entries.update(before)


def set_entry(holder: Any, name: Any, value: Any) -> None:
    """Sets an attribute, also of frozen dataclasses, or an entry of a dictionary or list."""
    entries = holder if isinstance(holder, list) else entries_of(holder)
    assert entries is not None
    entries[name] = value
