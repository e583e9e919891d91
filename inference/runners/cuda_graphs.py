"""Captured steps: CUDA graphs around the functions of a `Step`, from outside.

A graph replays kernels over fixed addresses, so a step costs one launch a function instead of one a kernel. No Python
runs at a replay. What a function works on is therefore one of three things:

- The state: it lies where it is, since `DecodeState` never moves, nor what is in it (`Drafter.has_static_state`).
- Values: trees, logits, noise, and the tensors of processors. They are copied into the graph's own tensors before each
  replay, and results are copied out into tensors that are the graph's own, too.
- Everything else is part of the key, by which there is one graph: numbers of rows and nodes, the size of the view, the
  policy, settings of processors.

All other memory comes from one pool of all graphs; nothing in it is read after a replay.
"""

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from draftsmith.inference.acceptance.exact import Acceptance
from draftsmith.inference.acceptance.rules import AcceptanceRule
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.cache.kv_cache import KVCache
from draftsmith.inference.request.token_history import TokenHistory
from draftsmith.inference.state import DecodeState
from draftsmith.inference.step import Runner, Step, accept, commit, draft, plant_root, verify
from draftsmith.inference.targets.backbone import TargetOutput
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.token_tree import TokenTree

# Graphs of one function before further ones run eagerly. A text crosses few views; every temperature is a new one.
GRAPH_LIMIT = 128
# Each size of the view is a set of graphs. Reading this many slots too many costs little beside reading the weights.
GRAPH_VIEW = 256

logger = logging.getLogger(__name__)


class CudaGraph:
    """One recorded function without arguments: a `torch.cuda.CUDAGraph`. docs/gpu.md says what ran on a GPU; the logic
    around it is tested on a CPU.

    Args:
        pool: memory that all graphs share; stream: of warm-ups and captures.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self.pool, self.stream = pool, stream
        self.graph = torch.cuda.CUDAGraph()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Runs the function once, where libraries will see the stream of the capture; returns its result."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = function()
        current.wait_stream(self.stream)
        return result

    def capture(self, function: Callable[[], None]) -> None:
        """Records the function. Its operators have no effect yet.

        Raises:
            RuntimeError: it needs the host.
        """
        # Decoders of other threads may allocate memory meanwhile.
        with torch.cuda.graph(self.graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            function()

    def replay(self) -> None:
        """Runs what was recorded."""
        self.graph.replay()


class Captured:
    """A graph with its own inputs and outputs, and the function, whose constants must stay alive.

    The tensors are made outside of the graph's memory, which other graphs use as well.

    Args:
        given: the tensors of the values of the first, eager call; result: what that returned.
    """

    def __init__(self, graph: CudaGraph, function: Callable[[Any], Any], given: Sequence[Tensor], result: Any) -> None:
        self.graph, self.function = graph, function
        self.inputs = [torch.empty_like(tensor) for tensor in given]
        self.outputs = [torch.empty_like(tensor) for tensor in find_tensors(result)]
        self.result = replace_tensors(result, iter(self.outputs))
        self.is_captured = False

    def run(self, values: Any, given: list[Tensor]) -> Any:
        """The function's result for `values`, whose tensors are `given`."""
        if given:
            torch._foreach_copy_(self.inputs, given)
        if not self.is_captured:
            inputs = replace_tensors(values, iter(self.inputs))
            self.graph.capture(lambda: torch._foreach_copy_(self.outputs, list(find_tensors(self.function(inputs)))))
            self.is_captured = True
        self.graph.replay()
        return self.result


class Graphs:
    """The graphs of one function, one for each key.

    Attributes:
        seconds: spent on capturing.
        is_eager: whether it has turned out that the function cannot be captured.
    """

    def __init__(self, name: str, new_graph: Callable[[], CudaGraph]) -> None:
        self.name, self._new_graph = name, new_graph
        self.seconds, self.is_eager = 0.0, False
        self.entries: dict[Any, Captured] = {}

    def run(self, key: Any, function: Callable[[Any], Any], values: Any) -> Any:
        """`function(values)`: eagerly the first time, which is a step like any other and warms up the libraries.

        Args:
            key: what is equal in calls that may share a graph, beside what `describe` says of the values.
        """
        if self.is_eager:
            return function(values)
        given = list(find_tensors(values))
        key = key, describe(values)
        entry = self.entries.get(key)
        if entry is None:
            if len(self.entries) == GRAPH_LIMIT:
                self._give_up(f"it has run with {GRAPH_LIMIT} settings and sizes; make a new Decoder for others")
                return function(values)
            graph = self._new_graph()
            result = graph.warm_up(lambda: function(values))
            self.entries[key] = Captured(graph, function, given, result)
            return result
        if entry.is_captured:
            return entry.run(values, given)
        start = time.perf_counter()
        try:
            return entry.run(values, given)
        except RuntimeError as error:
            self._give_up(str(error).partition("\n")[0])
            return function(values)
        finally:
            self.seconds += time.perf_counter() - start

    def _give_up(self, reason: str) -> None:
        logger.warning("%s runs eagerly from now on, not as a CUDA graph: %s", self.name, reason)
        self.is_eager = True


def _parts_of(value: Any) -> dict[Any, Any] | None:
    """What a value is made of: the items of a tuple or list, the fields of a dataclass, a processor's settings. None
    for anything else."""
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return vars(value) if isinstance(value, LogitsProcessor) else None


def find_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a value."""
    if isinstance(value, Tensor):
        yield value
    for part in (_parts_of(value) or {}).values():
        yield from find_tensors(part)


def replace_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A copy of the value with other tensors, in the order of `find_tensors`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if (parts := _parts_of(value)) is None:
        return value
    replaced = {name: replace_tensors(part, tensors) for name, part in parts.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(replaced.values())
    copied = copy.copy(value)
    for name, part in replaced.items():
        object.__setattr__(copied, name, part)  # also of frozen ones
    return copied


def describe(value: Any) -> Any:
    """Equal for values that may share a graph, in which all but the numbers in tensors is constant."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if (parts := _parts_of(value)) is not None:
        return type(value), *((name, describe(part)) for name, part in parts.items())
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


class _Sampling:
    """A sampler taken apart: values that differ from call to call, and the rest, which a graph holds."""

    def __init__(self, sampler: Sampler) -> None:
        ((settings, _),) = sampler.groups  # rows of other calls join eager steps only
        self.sampler, self.values = sampler, (sampler.row_seeds, settings.processors)
        self.key = settings.do_sample, sampler.keeps_scores

    def join(self, values: Any, history: TokenHistory) -> Sampler:
        """The sampler, on a graph's own values."""
        sampler, ((settings, rows),) = copy.copy(self.sampler), self.sampler.groups
        sampler.row_seeds, processors = values
        sampler.groups = [(dataclasses.replace(settings, processors=processors), rows)]
        sampler.texts = None if sampler.texts is None else history
        return sampler


def graph_runner(device: torch.device) -> Runner:
    """Replays CUDA graphs. Pending tokens after plain steps, lazy processors and prompts run eagerly.

    A graph holds the addresses of weights: a captured decoder sees weights that are changed in place, and no others.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    return CapturedFunctions(partial(CudaGraph, pool, stream)).runner


class CapturedFunctions:
    """The captured functions of one step. All graphs are of one state.

    Attributes:
        graphs: of each function, by its name.
        runner: runs them.
    """

    def __init__(self, new_graph: Callable[[], CudaGraph]) -> None:
        self.graphs = {name: Graphs(name, new_graph) for name in ("draft", "root", "verify", "accept", "commit")}
        self._state: DecodeState | None = None
        self.runner = Runner(
            "captured",
            self._draft,
            self._plant_root,
            self._verify,
            self._accept,
            self._commit,
            has_fixed_rows=True,
            view_multiple=GRAPH_VIEW,
            seconds=lambda: sum(graphs.seconds for graphs in self.graphs.values()),
            forget=self.forget,
        )

    def forget(self) -> None:
        """Drops all graphs, with the state that they belong to."""
        self._state = None
        for graphs in self.graphs.values():
            graphs.entries.clear()

    def _own(self, state: DecodeState) -> None:
        """Another state needs other graphs."""
        if state is not self._state:
            self.forget()
            self._state = state

    def _draft(
        self, step: Step, state: DecodeState, policy: TreePolicy, sampler: Sampler, width: int, in_view: Tensor
    ) -> Any:
        self._own(state)
        assert step.drafter is not None
        if not step.drafter.has_static_state or width != step.path_width:
            return draft(step, state, policy, sampler, width, in_view)
        parts = _Sampling(sampler)
        cache = state.cache

        def run(values: Any) -> Any:
            before = cache.offsets
            cache.offsets, own = values
            try:
                return draft(step, state, policy, parts.join(own, state.history), width, in_view)
            finally:
                cache.offsets = before

        key = policy, len(in_view), parts.key, getattr(state.draft, "threshold", None)
        return self.graphs["draft"].run(key, run, (cache.offsets, parts.values))

    def _plant_root(self, state: DecodeState, sampler: Sampler, vocab_size: int) -> Any:
        self._own(state)
        parts = _Sampling(sampler)
        return self.graphs["root"].run(
            parts.key, lambda own: plant_root(state, parts.join(own, state.history), vocab_size), parts.values
        )

    def _verify(self, step: Step, cache: KVCache, tree: TokenTree) -> Any:
        if step.target.is_encoder_decoder:  # each text's source has another size
            return verify(step, cache, tree)

        def run(values: tuple[TokenTree, Tensor, Tensor | None]) -> TargetOutput:
            before = cache.slots, cache.offsets
            own_tree, cache.slots, cache.offsets = values
            try:
                return verify(step, cache, own_tree)
            finally:
                cache.slots, cache.offsets = before

        windows = tuple(len(sizes) for sizes in cache.window_sizes.values())
        return self.graphs["verify"].run((cache.view, windows), run, (tree, cache.slots, cache.offsets))

    def _accept(
        self, state: DecodeState, tree: TokenTree, logits: Tensor, noise: Any, sampler: Sampler, rule: AcceptanceRule
    ) -> Any:
        parts = _Sampling(sampler)

        def run(values: Any) -> Acceptance:
            own_tree, own_logits, own_noise, sampling = values
            return accept(state, own_tree, own_logits, own_noise, parts.join(sampling, state.history), rule)

        key = rule.name, len(state.history.places), parts.key
        return self.graphs["accept"].run(key, run, (tree, logits, noise, parts.values))

    def _commit(self, state: DecodeState, *values: Any, **flags: Any) -> Any:
        return self.graphs["commit"].run((*flags.items(),), lambda own: commit(state, *own, **flags), values)
