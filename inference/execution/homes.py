"""Homes: the memory that captured graphs write in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.execution.parts import NotCapturableError, Parts, set_entry
from draftsmith.inference.execution.watched import storage_of


@dataclass
class _Home:
    """Memory that graphs write, and a weak reference to the object whose tensors are there now."""

    storage: torch.UntypedStorage
    owner: Callable[[], Any]


class Homes:
    """The memory that graphs write in place. An object of the next text (a drafter's state) moves in."""

    def __init__(self) -> None:
        self._by_address: dict[int, _Home] = {}
        self._by_path: dict[tuple[Any, ...], int] = {}

    def __contains__(self, address: int) -> bool:
        return address in self._by_address

    def settle(self, parts: Parts, numbers: list[int]) -> None:
        """Finds a home for these tensors, which share a storage: the one of tensors in the same place of an earlier
        object, or their own storage."""
        storage, first = parts.tensors[numbers[0]].untyped_storage(), numbers[0]
        if storage.data_ptr() in self._by_address:
            return
        if parts.roots[first] is None:
            raise NotCapturableError("it writes into an argument that no object holds")
        path = (*parts.paths[first], storage.nbytes(), storage.device)
        if path in self._by_path:
            self.move(parts, numbers, self._by_path[path])
            return
        self._by_path[path] = storage.data_ptr()
        self._by_address[storage.data_ptr()] = _Home(storage, weakref.ref(parts.roots[first]))

    def move(self, parts: Parts, numbers: list[int], address: int) -> None:
        """Moves tensors that share a storage to the home at this address. Tensors of another object that is still
        there move out first."""
        home, root = self._by_address[address], parts.roots[numbers[0]]
        owner = home.owner()
        if owner is not None and owner is not root:
            others = Parts.of(owner)
            staying = [number for number, tensor in enumerate(others.tensors) if storage_of(tensor) == address]
            if staying:
                _repoint(others, staying, home.storage.clone())
        _bytes_of(home.storage).copy_(_bytes_of(parts.tensors[numbers[0]].untyped_storage()))
        _repoint(parts, numbers, home.storage)
        home.owner = weakref.ref(root)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _repoint(parts: Parts, numbers: list[int], storage: torch.UntypedStorage) -> None:
    """Replaces tensors, wherever they are held, by views of another storage."""
    for number in numbers:
        old = parts.tensors[number]
        new = torch.empty(0, dtype=old.dtype, device=old.device)
        new.set_(storage, old.storage_offset(), old.shape, old.stride())
        for holder, name in parts.holders[number]:
            set_entry(holder, name, new)
        parts.tensors[number] = new
