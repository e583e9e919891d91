"""Watches a function run: which memory it reads and writes, and whether a CUDA graph can hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators whose result, a number or a shape, the host must wait for.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal")


def storage_of(tensor: Tensor) -> int:
    """The address of the memory that a tensor is a view of; 0 for an empty one."""
    return tensor.untyped_storage().data_ptr()


class Watch(TorchDispatchMode):
    """Notes what the operators in its block do.

    Attributes:
        touched, written: addresses of storages (`storage_of`).
        reason: why a graph cannot hold these operators; None = it can.
    """

    def __init__(self) -> None:
        super().__init__()
        self.touched: set[int] = set()
        self.written: set[int] = set()
        self.reason: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # inference mode hands over whole what is made of other operators, as `item` is
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        self.touched.update(map(storage_of, given))
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                self.written.update(storage_of(one) for one in tree_leaves(value) if isinstance(one, Tensor))
        name = func.name().split("::")[1].split(".")[0]
        is_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in READS or is_mask:
            self.reason = self.reason or f"{func} needs a value on the host"
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        # A number may be a tensor of no dimension on the CPU, unless it is copied.
        devices = {one.device for one in (*given, *made) if one.dim() or "copy" in name}
        if len(devices) > 1:
            self.reason = self.reason or f"{func} works on {' and '.join(sorted(map(str, devices)))}"


def watch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Watch]:
    """The function's result, and what it did."""
    with Watch() as found:
        result = function(*args, **kwargs)
    return result, found
