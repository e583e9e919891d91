"""A tape in the place of CUDA graphs: what is around graphs runs on a CPU.

As with a CUDA graph, a replay runs operators over the addresses of the capture, and none of the function's Python;
capturing has no effect; and the function must not need the host. What only passes through a graph lies in memory that
all graphs share, so a replay leaves nonsense there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.inference import Decoder
from draftsmith.inference.runners.cuda_graphs import CapturedFunctions, CudaGraph


class RefuseHostReads(TorchDispatchMode):
    """Raises where a tensor's values would reach the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # inference mode hands over whole what is made of other operators, as `item` is
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        refuse_host(func, args)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class Tape(RefuseHostReads):
    """Notes the operators of a function, with the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Sequence[Any], dict[str, Any], list[Tensor]]] = []
        self.owned: dict[int, Tensor] = {}  # memory that came into being
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def record(self, function: Callable[[], None]) -> None:
        try:
            with self:
                function()
        finally:
            for storage, before in self._before.values():
                storage.copy_(before)
        results = {address(tensor) for tensor in tensors_of(self.operators[-1][1])}
        self.owned = {place: tensor for place, tensor in self.owned.items() if place not in results}

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = {address(tensor): tensor for tensor in tensors_of((args, kwargs))}
        if func._schema.is_mutable:
            for place in given.keys() - self.owned.keys() - self._before.keys():
                storage = given[place].untyped_storage()
                self._before[place] = storage, storage.clone()
        result = func(*args, **kwargs)
        made = [tensor for tensor in tensors_of(result) if address(tensor) not in given]
        self.owned |= {address(tensor): tensor for tensor in made}
        if made or func._schema.is_mutable:  # else views
            self.operators.append((func, args, kwargs, made))
        return result

    def replay(self) -> None:
        for func, args, kwargs, made in self.operators:
            given = {address(tensor) for tensor in tensors_of((args, kwargs))}
            again = [tensor for tensor in tensors_of(func(*args, **kwargs)) if address(tensor) not in given]
            for tensor, new in zip(made, again, strict=True):
                tensor.copy_(new)
        spoil(self.owned.values())


def spoil(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else True if tensor.dtype == torch.bool else -(10**9))


def refuse_host(func: Any, args: Sequence[Any]) -> None:
    """Raises RuntimeError for an operator whose result, or its shape, depends on values."""
    is_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_of(args[1:2]))
    needs_host = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    if is_mask if func.name().startswith(("aten::index.", "aten::index_put")) else needs_host:
        raise RuntimeError(f"{func} needs a value on the host")


def tensors_of(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes())


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorder(CudaGraph):
    """Attributes: num_replays."""

    def __init__(self) -> None:
        self.num_replays = 0

    def warm_up(self, function: Callable[[], Any]) -> Any:
        return function()

    def capture(self, function: Callable[[], None]) -> None:
        self.tape = Tape()
        self.tape.record(function)

    def replay(self) -> None:
        self.num_replays += 1
        self.tape.replay()


class Recorded:
    """A decoder's captured step.

    Attributes:
        graphs: of each function, by its name.
    """

    def __init__(self, decoder: Decoder) -> None:
        captured = CapturedFunctions(Recorder)
        self.graphs = captured.graphs
        decoder.step.runner = captured.runner

    @property
    def num_graphs(self) -> int:
        return sum(len(graphs.entries) for graphs in self.graphs.values())

    @property
    def num_replays(self) -> int:
        made = [entry.graph for graphs in self.graphs.values() for entry in graphs.entries.values()]
        return sum(graph.num_replays for graph in made if isinstance(graph, Recorder))

    @property
    def eager(self) -> set[str]:
        """The functions that cannot be captured."""
        return {name for name, graphs in self.graphs.items() if graphs.is_eager}

    @property
    def used(self) -> set[str]:
        """The functions that have been captured."""
        return {
            name for name, graphs in self.graphs.items() if any(entry.is_captured for entry in graphs.entries.values())
        }
