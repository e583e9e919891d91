"""CapturedExecutor: a decode step's functions as CUDA graphs, captured by hand.

A graph replays kernels over fixed addresses, so a step costs one launch a function instead of one a kernel. No Python
runs at a replay. Around the graph of a function therefore stand:

- Inputs: tensors that the function only reads are copied into the graph's own ones before each replay.
- State: memory that the function writes (caches, scratch rows) stays where it is, its *home*. The next text's state
  moves into the home of the last one's.
- Outputs: the graph ends by copying its results into tensors that are its own. The next replay overwrites them.
- Attributes that the function sets are set again after each replay.

All other memory comes from one pool of all graphs. Nothing in it is read after a replay, so graphs may overwrite each
other's, in any order. There is one graph for each function and signature (`Parts.signature`): number of rows and nodes,
size of the view, every Python number.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.execution.executor import Executor
from draftsmith.inference.execution.homes import Homes
from draftsmith.inference.execution.parts import (
    NotCapturableError,
    Parts,
    Snapshot,
    hide_host_numbers,
    rebuild,
    set_entry,
)
from draftsmith.inference.execution.watched import storage_of, watch

# Signatures of one function before further ones run eagerly. A text crosses few views; every temperature is a new one.
GRAPH_LIMIT = 128
# Each size of the view is a set of graphs. Reading this many slots too many costs little beside reading the weights.
GRAPH_VIEW = 256

logger = logging.getLogger(__name__)


class Graph(ABC):
    """One recorded function without arguments."""

    @abstractmethod
    def warm_up(self, function: Callable[[], None]) -> None:
        """Runs the function once, where libraries will see the stream of the capture."""

    @abstractmethod
    def capture(self, function: Callable[[], None]) -> None:
        """Records the function. Its operators have no effect yet."""

    @abstractmethod
    def replay(self) -> None:
        """Runs what was recorded."""


class CudaGraph(Graph):
    """A `torch.cuda.CUDAGraph`. docs/gpu.md says what ran on a GPU; the logic around it is tested with a recorder on a
    CPU.

    Args:
        pool: memory that all graphs share; stream: of warm-ups and captures.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self.pool, self.stream = pool, stream
        self.graph = torch.cuda.CUDAGraph()

    def warm_up(self, function: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            function()
        current.wait_stream(self.stream)

    def capture(self, function: Callable[[], None]) -> None:
        # Decoders of other threads may allocate memory meanwhile.
        with torch.cuda.graph(self.graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            function()

    def replay(self) -> None:
        self.graph.replay()


def cuda_graphs(device: torch.device) -> Callable[[], Graph]:
    """Makes the graphs of one executor."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    return lambda: CudaGraph(pool, stream)


class CapturedExecutor(Executor):
    """Runs each function of each signature eagerly at first, then as a graph.

    A graph holds the addresses of weights: a captured decoder sees weights that are changed in place, and no others.

    Args:
        new_graph: makes a graph.
    """

    has_graphs = True
    view_multiple = GRAPH_VIEW

    def __init__(self, new_graph: Callable[[], Graph]) -> None:
        self.new_graph = new_graph
        self.homes = Homes()
        self.calls: dict[tuple[Any, ...], CapturedCall] = {}
        self._num_calls: Counter[str] = Counter()
        self._eager: set[str] = set()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = getattr(function, "__qualname__", type(function).__name__)
        if name in self._eager:
            return function(*args, **kwargs)
        parts = Parts.of((function, args, kwargs))
        call = self.calls.get(parts.signature)
        if call is None:
            if self._num_calls[name] == GRAPH_LIMIT:
                self._give_up(name, f"it has run with {GRAPH_LIMIT} settings and sizes; make a new Decoder for others")
                return function(*args, **kwargs)
            self._num_calls[name] += 1
            call = self.calls[parts.signature] = CapturedCall(self.new_graph(), self.homes)
        if call.is_captured:
            return call.run(parts)
        start = time.perf_counter()
        try:
            result = call.run(parts)
        except NotCapturableError as error:
            self._give_up(name, str(error))
            return function(*args, **kwargs)
        finally:
            self.compile_seconds += time.perf_counter() - start
        if call.refusal is not None:
            self._give_up(name, call.refusal)
        return result

    run_fixed = run

    def keep(self, values: Tensor) -> Tensor:
        return values.clone()

    def forget(self) -> None:
        self.calls.clear()
        self._num_calls.clear()
        self.homes = Homes()

    def _give_up(self, name: str, reason: str) -> None:
        logger.warning("%s runs eagerly from now on, not as a CUDA graph: %s", name, reason)
        self._eager.add(name)


class CapturedCall:
    """One function with arguments of one signature. Its first call runs on the arguments themselves and is watched. The
    second runs on the graph's own inputs. The third is captured.

    Attributes:
        inputs, outputs: the graph's own tensors.
        refusal: why there will be no graph, although the first call has run; None = nothing speaks against it.
    """

    def __init__(self, graph: Graph, homes: Homes) -> None:
        self.graph, self.homes = graph, homes
        self.is_captured = False
        self.refusal: str | None = None
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._whole: list[Any] | None = None  # what the signature names by its id
        self._touched: set[int] = set()  # numbers of tensors
        self._written: set[int] = set()
        self._state: list[tuple[list[int], int]] = []  # tensors in one storage, and the address of its home
        self._copied: list[int] = []  # tensors that `inputs` are copies of
        self._is_built = False

    def run(self, parts: Parts) -> Any:
        """Runs the function. If it raises NotCapturableError, the function may be run again."""
        if self._whole is None:
            return self._watch(parts)
        if not self._is_built:
            self._build(parts)
            self._load(parts)
            self.graph.warm_up(self._run_own)
            self._is_built = True
            return self._finish(parts)
        self._load(parts)
        if not self.is_captured:
            try:
                self.graph.capture(self._run_own)
            except RuntimeError as error:
                raise NotCapturableError(str(error)) from error
            self.is_captured = True
        self.graph.replay()
        return self._finish(parts)

    def _watch(self, parts: Parts) -> Any:
        function, args, kwargs = parts.value
        before, lists = Snapshot(parts.objects), [list(one) for one in parts.lists]
        result, found = watch(function, *args, **kwargs)
        self.refusal = found.reason
        if any(list(map(id, old)) != list(map(id, new)) for old, new in zip(lists, parts.lists, strict=True)):
            self.refusal = "it changes a list in place"
        if parts.closed is not None:
            self.refusal = f"nobody can see what it sets in a {parts.closed}: leave __slots__ out"
        known = {id(one): one for one in parts.objects}
        # What is handed on unread must not be left out.
        rebuild((result, before.changes()), lambda tensor: found.touched.add(storage_of(tensor)), known)
        for number, tensor in enumerate(parts.tensors):
            if storage_of(tensor) in found.touched:
                self._touched.add(number)
            if storage_of(tensor) in found.written:
                self._written.add(number)
        self._whole = parts.whole
        return result

    def _build(self, parts: Parts) -> None:
        """Makes the graph's own arguments."""
        groups: dict[int, list[int]] = {}
        for number, tensor in enumerate(parts.tensors):
            groups.setdefault(storage_of(tensor), []).append(number)
        own: dict[int, Tensor] = {}  # by the id of the caller's tensor
        for place, numbers in groups.items():
            if not self._touched.intersection(numbers):  # only sizes are read
                kept = [parts.tensors[number].new_empty(()).expand(parts.tensors[number].shape) for number in numbers]
            elif place and (self._written.intersection(numbers) or place in self.homes):
                self.homes.settle(parts, numbers)
                kept = [parts.tensors[number] for number in numbers]
                self._state.append((numbers, storage_of(kept[0])))
            else:
                kept = [torch.empty_like(parts.tensors[number]) for number in numbers]
                self._copied += numbers
                self.inputs += kept
            own |= {id(parts.tensors[number]): tensor for number, tensor in zip(numbers, kept, strict=True)}
        copies: dict[int, Any] = {}
        self._value = rebuild(parts.value, lambda tensor: own[id(tensor)], copies)
        objects = [copies[id(one)] for one in parts.objects]
        hide_host_numbers(objects)
        self._before = Snapshot(objects)
        self._given = [_Given(number) for number in range(len(objects))]

    def _load(self, parts: Parts) -> None:
        """Brings the caller's tensors to where the graph reads them."""
        for numbers, home in self._state:
            if storage_of(parts.tensors[numbers[0]]) != home:
                self.homes.move(parts, numbers, home)
        if self.inputs:
            torch._foreach_copy_(self.inputs, [parts.tensors[number] for number in self._copied])

    def _run_own(self) -> None:
        """Runs the function on the graph's own arguments. This is what a graph records."""
        self._before.restore()
        function, args, kwargs = self._value
        result = function(*args, **kwargs)
        homes = {home for _, home in self._state}
        found: list[Tensor] = []

        def own(tensor: Tensor) -> Tensor:
            if storage_of(tensor) in homes:
                return tensor
            found.append(tensor)
            if len(found) > len(self.outputs):
                self.outputs.append(torch.empty_like(tensor))
            return self.outputs[len(found) - 1]

        given = {id(one): place for one, place in zip(self._before.objects, self._given, strict=True)}
        self._result = rebuild((result, self._before.changes()), own, given)
        if found:
            torch._foreach_copy_(self.outputs, found)

    def _finish(self, parts: Parts) -> Any:
        """The result, after setting on the caller's objects what the function set on the graph's own."""
        objects = {id(one): parts.objects[one.number] for one in self._given}
        result, changes = rebuild(self._result, lambda tensor: tensor, objects)
        for number, name, value in changes:
            set_entry(parts.objects[number], name, value)
        return result


@dataclass(frozen=True)
class _Given:
    """In a result, an object of the caller's."""

    number: int
