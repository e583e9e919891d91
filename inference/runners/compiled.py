"""Compiled steps: torch.compile around the functions of a `Step`, from outside.

On a CPU the weights of small models are frozen into the graphs: inductor then packs them once for its own matrix
kernels or oneDNN's, which for passes of a few tokens are several times faster than calls that pack them every time.
"""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import logging
import textwrap
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.cache.kv_cache import KVCache
from draftsmith.inference.cache_folder import keep_compiled_kernels
from draftsmith.inference.kernels.attention import grouped_attention, has_bfloat16_alone
from draftsmith.inference.runners.few_rows import add_rows
from draftsmith.inference.state import DecodeState
from draftsmith.inference.step import (
    VERIFIED_CHUNK,
    Runner,
    Step,
    accept,
    begin_draft,
    commit,
    draft,
    plant_root,
    verify,
)
from draftsmith.inference.targets.backbone import TargetOutput
from draftsmith.inference.targets.model_config import has_attention_interface
from draftsmith.inference.trees.candidates import CandidateTrees
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.token_tree import TokenTree

# Each graph holds a packed copy of the weights it reads. Larger models would fill the memory.
FREEZE_LIMIT_BYTES = 1 << 30
# Graphs torch keeps of one function before it gives up on it.
RECOMPILE_LIMIT = 128
REASON_LENGTH = 400  # torch names every line of the model that led to a product
FROZEN_OPTIONS = {"cpp.enable_concat_linear": True}  # products of one input, such as q, k and v, become one
# Inductor's own matrix kernels, and nothing beside them, so that nothing is timed.
OWN_KERNELS = {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}

_NUMBERS = itertools.count()
_is_collecting = True  # Python's collector, outside of torch's compiler

logger = logging.getLogger(__name__)


class Compiler:
    """Compiles functions at their first calls.

    A graph holds the weights as they were when it was made, and the attributes of modules, such as the active
    adapters. A compiled decoder does not see later changes.

    Args:
        modules: the functions read their weights.
        drafter_changes: functions that draft keep their weights outside of the graphs.

    Attributes:
        seconds: spent on making graphs so far.
        reads_prompts: whether a graph serves any number of tokens at full speed, and so prompts.
    """

    def __init__(self, modules: Sequence[nn.Module], *, drafter_changes: bool = False) -> None:
        keep_compiled_kernels()
        _rest_collector()
        self.drafter_changes = drafter_changes
        self.seconds, self.reads_prompts = 0.0, False
        self._functions: dict[tuple[Callable[..., Any], bool | None], _CompiledFunction] = {}
        self._policies: dict[int, tuple[TreePolicy, TreePolicy]] = {}  # with the policy, which keeps its id
        self._configs = _find_attention_configs(modules)
        weights = {id(p): p for module in modules for p in (*module.parameters(), *module.buffers())}.values()
        num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        self.is_freezing = num_bytes <= FREEZE_LIMIT_BYTES and all(weight.device.type == "cpu" for weight in weights)
        self.options: dict[str, Any] = {"guard_filter_fn": _keep_guards} if _CAN_FILTER_GUARDS else {}
        self.changing_options = {**self.options, "freezing": False}
        if self.is_freezing:
            self.options |= FROZEN_OPTIONS
            self.reads_prompts = _prefers_onednn(weight.dtype for weight in weights)
            if self.reads_prompts:
                self.options["joint_custom_post_pass"] = add_rows
            else:  # inductor's own kernels are made for one number of rows
                self.options |= OWN_KERNELS

    def is_like(self, other: Compiler) -> bool:
        """Whether both make the same graphs of a function that reads no drafter."""
        return (self.is_freezing, self.options) == (other.is_freezing, other.options)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Sets torch's limit of graphs, whether weights are frozen, and models' attention, while functions run."""
        # Stored graphs would hold weights, and not be told apart by them.
        frozen = {"freezing": True, "fx_graph_cache": False}
        limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)  # in newer releases a thread's own
        with (
            torch._dynamo.config.patch(recompile_limit=limit),
            torch._inductor.config.patch(frozen if self.is_freezing else {}),
            ExitStack() as stack,
        ):
            for config in self._configs:
                stack.enter_context(grouped_attention(config))
            yield

    def compile(
        self, function: Callable[..., Any], *, is_fixed: bool = False, drafts: bool = False
    ) -> Callable[..., Any]:
        """The function, compiled; one and the same for one function. `drafts`: it reads the drafter's weights.

        A number or size that has changed once is left open in the next graph, so that few graphs serve all sizes. With
        `is_fixed`, every new size makes a graph of its own, except sizes that are marked as open: for functions that
        read many weights, which run fastest at a known size.
        """
        key = (function, False if is_fixed else None)
        if key not in self._functions:
            options = self.changing_options if drafts and self.drafter_changes else self.options
            self._functions[key] = _CompiledFunction(function, self, options, dynamic=key[1])
        return self._functions[key]

    def compile_policy(self, policy: TreePolicy) -> TreePolicy:
        """A copy of the policy whose functions are compiled; all policies share their graphs."""
        if id(policy) not in self._policies:
            compiled = copy.copy(policy)
            for name, part in vars(policy).items():  # policies that are made of others
                if isinstance(part, TreePolicy):
                    setattr(compiled, name, self.compile_policy(part))
            for name in policy.level_functions:
                setattr(compiled, name, self.compile(getattr(policy, name), drafts=True))
            self._policies[id(policy)] = policy, compiled
        return self._policies[id(policy)][1]


def compiled_runner(
    modules: Sequence[nn.Module], *, drafter_changes: bool = False, beside: Step | None = None
) -> Runner:
    """Runs compiled functions. Pending tokens after plain steps, lazy processors, and most prompts run eagerly.

    Args:
        modules: the step reads their weights.
        drafter_changes: the drafter's weights may change in place.
        beside: a compiled step of the same target, whose `verify` serves this one, too.
    """
    compiler = Compiler(modules, drafter_changes=drafter_changes)
    begin_compiled = compiler.compile(begin_draft, is_fixed=True, drafts=True)
    accept_any_text = compiler.compile(accept)

    def draft_compiled(
        step: Step, state: DecodeState, policy: TreePolicy, sampler: Sampler, width: int, in_view: Tensor
    ) -> tuple[TokenTree, Tensor | None]:
        _open(in_view)
        # After plain steps the width is another every time: not worth a graph.
        begin = begin_compiled if width == step.path_width else begin_draft
        return draft(step, state, compiler.compile_policy(policy), sampler, width, in_view, begin=begin)

    def accept_compiled(state: DecodeState, *args: Any) -> Any:
        _open(state.history.places)
        return accept_any_text(state, *args)

    return Runner(
        "compiled",
        draft_compiled,
        compiler.compile(plant_root),
        _CompiledVerify(compiler, beside),
        accept_compiled,
        compiler.compile(commit),
        has_fixed_rows=True,
        reads_prompts=compiler.reads_prompts,
        active=lambda _: compiler.active(),
        seconds=lambda: compiler.seconds + (beside.runner.seconds() if beside is not None else 0.0),
    )


def _open(values: Tensor, dim: int = 0) -> None:
    """Says that this size changes from call to call."""
    torch._dynamo.maybe_mark_dynamic(values, dim)


class _CompiledVerify:
    """`verify`: one graph for trees of all sizes to choose from, and prompts; each would have its own packed copy of
    the weights.

    Args:
        beside: its graphs serve this one's steps where they hand out the same states.
    """

    def __init__(self, compiler: Compiler, beside: Step | None) -> None:
        self._compiler, self._run = compiler, compiler.compile(verify, is_fixed=True)
        self._run_of_maker = self._run
        self._maker: Step | None = None  # whose graphs serve
        other = None if beside is None else beside.runner.verify
        if isinstance(other, _CompiledVerify) and other._compiler.is_like(compiler):
            self._maker, self._run_of_maker = other._maker or beside, other._run_of_maker

    def __call__(self, step: Step, cache: KVCache, tree: TokenTree) -> TargetOutput:
        wanted, maker, run = tuple(step.feature_layers), self._maker or step, self._run_of_maker
        if wanted not in ((), (step.target.num_layers,), tuple(maker.feature_layers)):
            maker, run = step, self._run
        steps = {step, maker}
        for slots in (cache.slots_in_view, *cache.window_sizes.values()):
            _open(slots)
        if tree.num_nodes > 1:
            reads_prompts = any(one.verifies_prompts for one in steps)
            if reads_prompts:
                # A bound that one graph can have for all: prompts are chains of a chunk.
                longest = max(VERIFIED_CHUNK, *(one.path_width for one in steps))
                tree = replace(tree, max_depth=longest - 1)
            if reads_prompts or any(isinstance(one.policy, CandidateTrees) for one in steps):
                for nodes in (tree.token_ids, tree.parents, tree.depths, cache.slots):
                    _open(nodes, dim=1)
        output: TargetOutput = run(maker, cache, tree)
        if wanted == tuple(maker.feature_layers):
            return output
        return replace(output, features=output.last if wanted else None)


class _CompiledFunction:
    def __init__(
        self, function: Callable[..., Any], compiler: Compiler, options: dict[str, Any], *, dynamic: bool | None
    ) -> None:
        self.function = _copy_function(function)
        self.dynamic = dynamic
        self.compiler, self.options = compiler, options
        # In one piece: after a break of the graph, the guards that are dropped would be missed (`_keep_guards`).
        # A copy of the options, since `torch.compile` takes the guard filter out of the dictionary that it gets.
        self.compiled: Callable[..., Any] = torch.compile(
            self.function, dynamic=dynamic, fullgraph=True, options={**options}
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphs, start, first = count_graphs(), time.perf_counter(), self.compiled
        while True:
            compiled = self.compiled
            try:
                result = compiled(*args, **kwargs)
                break
            except (*_LIMIT_ERRORS, *_COMPILER_ERRORS) as error:  # nothing of the step has run
                if compiled is self.function:
                    raise
                if compiled is self.compiled:
                    self._compile_otherwise(error)
        if count_graphs() > graphs or compiled is not first:
            self.compiler.seconds += time.perf_counter() - start
        return result

    def _compile_otherwise(self, error: Exception) -> None:
        """Without inductor's own kernels, some of whose products it cannot make; the function itself after that."""
        if isinstance(error, _LIMIT_ERRORS):  # every number of a setting, a temperature for one, makes a graph
            self.compiled = self.function
            logger.warning(
                "%s has run with too many settings to compile another graph, and now runs eagerly: make a new Decoder "
                "for other settings",
                self.function.__name__,
            )
            return
        way, least = "runs eagerly", {name: self.options[name] for name in ("freezing",) if name in self.options}
        can_compile = least != self.options and not isinstance(error, torch._dynamo.exc.Unsupported)
        self.compiled, self.options = self.function, least
        if can_compile:
            way = "is compiled without kernels of its own"
            self.compiled = torch.compile(self.function, dynamic=self.dynamic, fullgraph=True, options={**least})
        logger.warning(
            "torch.compile could not compile %s as one graph, and it now %s, which is slower: %s",
            self.function.__name__,
            way,
            textwrap.shorten(str(error).partition("\n\n")[0], REASON_LENGTH, placeholder=" ..."),
        )


_CAN_FILTER_GUARDS = hasattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe")  # came with the option itself
_LIMIT_ERRORS: tuple[type[Exception], ...] = (
    (torch._dynamo.exc.FailOnRecompileLimitHit,) if hasattr(torch._dynamo.exc, "FailOnRecompileLimitHit") else ()
)
_COMPILER_ERRORS: tuple[type[Exception], ...] = (
    torch._dynamo.exc.BackendCompilerFailed,
    torch._dynamo.exc.Unsupported,
    *((torch._inductor.exc.InductorError,) if hasattr(torch._inductor.exc, "InductorError") else ()),
)


def _find_attention_configs(modules: Iterable[nn.Module]) -> list[Any]:
    """The text configs of the language models in the modules, as far as `Backbone` replaces their attention."""
    models = (part for module in modules for part in module.modules() if isinstance(part, PreTrainedModel))
    found = [
        model.config.get_text_config()
        for model in models
        if has_attention_interface(model)
        and not model.config.is_encoder_decoder
        and model.get_output_embeddings() is not None  # not an image encoder
    ]
    return list({id(config): config for config in found}.values())


def _prefers_onednn(dtypes: Iterable[torch.dtype]) -> bool:
    """Whether oneDNN's kernels for packed weights are the faster ones."""
    return has_bfloat16_alone() and torch.bfloat16 in dtypes


def _keep_guards(guards: Sequence[Any]) -> list[bool]:
    """Guards on a function's arguments are kept; those on globals and on modules, thousands for a large model, are not:
    nobody rewrites a library or a frozen model between two steps, and checking took a tenth of a step."""
    return [not guard.is_global and not guard.orig_guard.source.is_unspecialized_nn_module() for guard in guards]


def _copy_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own: torch keeps its graphs per code object, and without guards on modules
    the graphs of one decoder would be taken for graphs of another.

    Decorators such as `torch.no_grad` are left out, since steps run without autograd. Otherwise torch would compile the
    decorator's code, which all functions share.
    """
    plain = inspect.unwrap(getattr(function, "__func__", function))
    copied = types.FunctionType(
        plain.__code__.replace(co_name=f"{plain.__name__}_{next(_NUMBERS)}"),
        plain.__globals__,
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    copied.__kwdefaults__ = plain.__kwdefaults__
    owner = getattr(function, "__self__", None)
    return copied if owner is None else types.MethodType(copied, owner)


def _rest_collector() -> None:
    """Python's search for cycles took an eighth of the time in which graphs are made, and rests during that."""
    handler = torch._dynamo.callback.callback_handler  # which counts the threads that make graphs
    for callbacks, own in ((handler.start_callbacks, _stop_collector), (handler.end_callbacks, _start_collector)):
        if own not in callbacks:  # torch._dynamo.reset clears them
            callbacks.append(own)


def _stop_collector(*_: Any) -> None:
    global _is_collecting
    _is_collecting = gc.isenabled()
    gc.disable()


def _start_collector(*_: Any) -> None:
    if _is_collecting:
        gc.enable()


def count_graphs() -> int:
    """Graphs torch.compile has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
