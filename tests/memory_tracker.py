"""Counts the bytes of tensors that are alive, and their peak, by storage, on the CPU.

`MemoryTracker` sees the tensors that operators take and return, also inside operators that torch composes of others. It
does not see what a kernel allocates and frees internally.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ATOMS = (str, bytes, int, float, bool, type(None), type, torch.dtype, torch.device)


class MemoryTracker(TorchDispatchMode):
    """While active, follows every storage that an operator takes or returns until it is freed.

    Worked example, in float32:

        with MemoryTracker() as tracker:
            a = torch.zeros(100)        live 400, peak 400
            b = a + 1                   live 800, peak 800
            c = a[:50]                  a view: nothing new
            del a, b                    live 400: c holds the storage of a

    Attributes:
        live: bytes of the followed storages that are alive.
        peak: the maximum of `live` since the beginning, or since `restart_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._followed: dict[int, tuple[weakref.ref[Any], int]] = {}  # by the storage's address

    def follow(self, *owners: Any) -> None:
        """Counts tensors that existed before: those that these objects hold (see `find_tensors`)."""
        for tensor in find_tensors(*owners):
            self._follow(tensor)

    def restart_peak(self) -> None:
        self.peak = self.live

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._followed:
            size_before = self._followed[address][1]
            self.live += size - size_before  # 0, but for what was resized
            self._followed[address] = (self._followed[address][0], size)
        else:
            self._followed[address] = (weakref.ref(storage, lambda _: self._forget(address)), size)
            self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, address: int) -> None:
        _, size = self._followed.pop(address)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            composed = func.decompose(*args, **kwargs)  # into the operators it is composed of, which come by here
        if composed is not NotImplemented:
            return composed
        result = func(*args, **kwargs)
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor):
                self._follow(value)
        return result


def find_tensors(*owners: Any) -> Iterator[Tensor]:
    """The tensors within modules (parameters and buffers), containers and the attributes of objects."""
    seen: set[int] = set()
    waiting = list(owners)
    while waiting:
        value = waiting.pop()
        if isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, nn.Module):
            waiting += [*value.parameters(), *value.buffers()]
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif hasattr(value, "__dict__"):
            waiting += vars(value).values()


def count_bytes(*owners: Any, besides: Sequence[Any] = ()) -> int:
    """Bytes of the storages of `find_tensors(*owners)`, each counted once; those of `besides` are not."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in find_tensors(*owners)}
    for tensor in find_tensors(*besides):
        storages.pop(tensor.untyped_storage()._cdata, None)
    return sum(storages.values())
