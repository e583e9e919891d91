"""A recorder in the place of CUDA graphs: the logic around graphs runs on a CPU.

A replay runs the function again, over the arguments that it was captured with. As in a CUDA graph, capturing has no
effect, and the function must not need the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.inference.execution.captured import CapturedExecutor, Graph


class WithoutEffect(TorchDispatchMode):
    """Undoes all writes to memory at the end of its block."""

    def __enter__(self) -> Any:
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and (storage := value.untyped_storage()).nbytes():
                    self.saved.setdefault(storage.data_ptr(), (storage, storage.clone()))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        for storage, before in self.saved.values():
            storage.copy_(before)


class Recorder(Graph):
    """Attributes: num_replays."""

    def __init__(self) -> None:
        self.num_replays = 0

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def capture(self, function: Callable[[], None]) -> None:
        self.function = function
        with WithoutEffect():
            function()

    def replay(self) -> None:
        self.num_replays += 1
        self.function()


def recording_executor() -> CapturedExecutor:
    return CapturedExecutor(Recorder)
