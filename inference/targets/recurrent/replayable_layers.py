"""Runs a model's recurrent layers so that their states can be rolled back.

A mixer is the module of a layer that keeps a recurrent or convolutional state (Mamba, gated delta rule, short
convolutions). The model runs as a copy that shares all weights and all modules except the mixers, which get their
states from `RecurrentStates`.

A state cannot be cut back to the accepted tokens. So a mixer reads the drafts from a copy of the state, and reads the
accepted tokens once more when they are known. Only its recurrence runs twice. The linear layers, which hold nearly all
of its weights, run once: those that read the mixer's input are recorded and played back, and the last one has nothing
to do in a replay. Attention, MLPs and experts run once.

A mixer reads a chain in one call where that gives what transformers' passes of single tokens give; on a CPU, and
elsewhere, token by token. Its linear layers read all tokens at once in both cases.

In a tree, the rows of a mixer's batch are the nodes of one level, each with its parent's state. After a chain that was
read token by token, all states are there, and nothing is replayed.

Legend: B batch, N tokens of a pass, R rows of a mixer's call, P tokens of each row, W nodes of a level, G rows that are
replayed.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from draftsmith.inference.cache.recurrent_states import RecurrentStates, States, StateSpec
from draftsmith.inference.targets.copied_modules import copy_module, replace_modules
from draftsmith.inference.targets.recurrent.plans import Group, Levels, group_rows, pick_nodes

RunLinear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LinearRoles:
    """What the linear layers of a mixer read and give.

    Attributes:
        inputs: names of the layers that read the mixer's input.
        output: name of the layer whose output is the mixer's; None if there is none.
    """

    inputs: frozenset[str] = frozenset()
    output: str | None = None


@dataclass(frozen=True)
class Recurrence:
    """A model's recurrent layers.

    Attributes:
        mixers: number of each recurrent layer in the cache -> name of its mixer in the model.
        specs, roles: the states of each, and its linear layers.
        continues: whether a pass of several tokens continues from a state. If not, a prompt is read in one pass, and
            everything after it token by token.
        drafts_in_one: whether mixers read chains in one call; else token by token, as transformers' generate does.
    """

    mixers: dict[int, str]
    specs: dict[int, tuple[StateSpec, ...]]
    roles: dict[int, LinearRoles]
    continues: bool = True
    drafts_in_one: bool = True


@dataclass
class _Linears:
    """The linear layers of one mixer while it reads nodes [B, N] in one or more calls: each runs once.

    Those that read the mixer's input compute all nodes at the first call. The last one waits for the last call.

    Attributes:
        roles: of the layers.
        hidden: the mixer's input [B, N, D]; None in a replay, in which nobody reads the mixer's output.
        take: from all nodes [B, N, ...] to the rows of a call, by its number.
        outputs: [B, N, ...] of the layers that read the mixer's input, by name.
        call: the number of the present call.
        waiting: the last layer, and its inputs so far.
    """

    roles: LinearRoles
    hidden: Tensor | None
    take: Callable[[Tensor, int], Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    call: int = 0
    waiting: list[tuple[RunLinear, Tensor]] = field(default_factory=list)

    def run(self, name: str, module: Any, forward: RunLinear, values: Tensor) -> Tensor:
        """The output of layer `name` for its input in a call of the mixer."""
        if name == self.roles.output:
            self.waiting.append((forward, values))
            return values.new_zeros(*values.shape[:-1], module.out_features)
        if name not in self.roles.inputs:
            return forward(values)
        if name not in self.outputs:
            assert self.hidden is not None, "a replay plays back what a pass has recorded"
            self.outputs[name] = forward(self.hidden)
        return self.take(self.outputs[name], self.call)

    def finish(self, outputs: Sequence[Any], to_nodes: Callable[[Sequence[Tensor]], Tensor]) -> Any:
        """The mixer's outputs [B, N, ...] from those of its calls."""
        if not self.waiting:
            return _map(lambda *parts: to_nodes(parts), *outputs)
        return self.waiting[0][0](to_nodes([values for _, values in self.waiting]))


class _Current(threading.local):
    """How this thread's linear layers within a mixer run; None = as they are."""

    linears: _Linears | None = None


class ReplayableLayers:
    """A model whose mixers can be rolled back.

    Attributes:
        causal_lm: the copy; without a cache that has states, it runs as the model does.
    """

    def __init__(self, causal_lm: nn.Module, recurrence: Recurrence) -> None:
        self.recurrence = recurrence
        self._current = _Current()
        self._copied, self._parts = causal_lm, [*map(id, causal_lm.modules())]
        layers = {causal_lm.get_submodule(name): layer for layer, name in recurrence.mixers.items()}
        self.causal_lm = replace_modules(
            causal_lm, lambda part: self._place(part, layers[part]) if part in layers else None
        )

    def check_again(self) -> None:
        """Refuses (ValueError) a model whose modules are others than those that were copied."""
        if [*map(id, self._copied.modules())] != self._parts:
            raise ValueError(
                f"modules of this {type(self._copied).__name__} were added or removed, such as an adapter's, after its "
                "recurrent layers were prepared: make a new Decoder"
            )

    def new_states(self, batch_size: int) -> RecurrentStates:
        return RecurrentStates(self.recurrence.specs, batch_size)

    def plan_reading(self, states: RecurrentStates | None, counts: Tensor) -> None:
        """Begins a pass over prompts, which commits the first `counts` [B] tokens. The host reads the counts."""
        assert states is not None, "the cache of a recurrent target"
        states.apply_accepted()
        numbers = counts.tolist()
        states.plan_pass(group_rows(numbers, states.lengths, counts.device))
        states.note_read(numbers)

    def plan_drafting(self, states: RecurrentStates | None, parents: Tensor) -> None:
        """Begins a pass over trees with these parents [B, N], which the host reads."""
        assert states is not None, "the cache of a recurrent target"
        states.plan_pass(Levels.of_parents(parents))

    def _place(self, module: nn.Module, layer: int) -> nn.Module:
        names = list_linears(module)
        inner = replace_modules(module, lambda part: self._place_linear(names[part], part) if part in names else None)
        return copy_module(inner, forward=partial(self._run, Mixer(inner.forward, layer)))

    def _place_linear(self, name: str, module: Any) -> nn.Module:
        """A copy of a linear layer that looks up how it runs."""
        forward = module.forward

        def run(values: Tensor, *args: Any, **kwargs: Any) -> Any:
            linears = self._current.linears
            if linears is None:
                return forward(values, *args, **kwargs)
            return linears.run(name, module, partial(forward, *args, **kwargs) if args or kwargs else forward, values)

        return copy_module(module, forward=run)

    @contextmanager
    def _sharing(self, linears: _Linears) -> Iterator[_Linears]:
        self._current.linears = linears
        try:
            yield linears
        finally:
            self._current.linears = None

    def _run(self, mixer: Mixer, *args: Any, **kwargs: Any) -> Any:
        """The mixer's forward within the copy."""
        call = mixer.bind(args, kwargs)
        states = None if call is None else getattr(call[0], "states", None)
        if call is None or states is None:
            return mixer.forward(*args, **kwargs)
        _, inputs, others = call
        run = self._draft if isinstance(states.plan, Levels) else self._read
        return run(mixer, states, inputs, others)

    def _read(self, mixer: Mixer, states: RecurrentStates, inputs: dict[str, Tensor], others: dict[str, Any]) -> Any:
        groups: list[Group] = states.plan
        num_rows, num_tokens = next(iter(inputs.values())).shape[:2]
        outputs: Any = None
        for group in groups:
            own = {name: values[group.rows.to(values.device), : group.count] for name, values in inputs.items()}
            before = None if group.is_first else states.take(mixer.layer, group.rows)
            if group.is_first or self.recurrence.continues:
                found, after = mixer.run(own, others, before)
            else:
                assert before is not None
                levels = Levels.of_paths(torch.arange(group.count).expand(len(group.rows), -1))
                steps, all_after = mixer.run_levels(own, others, before, levels)
                found, after = _map(lambda *parts: torch.cat(parts, dim=1), *steps), all_after[-1]
            states.put(mixer.layer, group.rows, after)
            if len(group.rows) == num_rows and group.count == num_tokens:
                return found
            if outputs is None:
                outputs = _map(lambda part: part.new_zeros(num_rows, num_tokens, *part.shape[2:]), found)
            _map(partial(_fill_output, group), outputs, found)
        return outputs if groups else mixer.run(inputs, others, None)[0]  # nothing but padding

    def _draft(self, mixer: Mixer, states: RecurrentStates, inputs: dict[str, Tensor], others: dict[str, Any]) -> Any:
        levels: Levels = states.plan
        hidden, roles = next(iter(inputs.values())), self.recurrence.roles[mixer.layer]
        before = states.take(mixer.layer, torch.arange(len(hidden)))
        if levels.is_chain and self.recurrence.drafts_in_one:
            with self._sharing(_Linears(roles, hidden, lambda values, _: values)) as linears:
                found, final = mixer.run(inputs, others, before)
            outputs = linears.finish([found], lambda parts: parts[0])
            after = [final] if hidden.shape[1] == 1 else []
        else:
            with self._sharing(_Linears(roles, hidden, levels.take)) as linears:
                steps, after = mixer.run_levels(inputs, others, before, levels, linears, keeps_all=levels.is_chain)
            outputs = linears.finish(steps, levels.to_nodes)
        replay = partial(self._replay, mixer, inputs, others, linears.outputs)
        states.record(mixer.layer, replay, after if levels.is_chain else [])
        return outputs

    @torch.no_grad()
    def _replay(
        self,
        mixer: Mixer,
        inputs: dict[str, Tensor],
        others: dict[str, Any],
        outputs: dict[str, Tensor],
        rows: Tensor,
        nodes: Tensor,
        before: States,
    ) -> States:
        """The states after nodes [G, P] of rows [G] (see `RecurrentStates`).

        Args:
            inputs: of the mixer, per token [B, N, ...]; others: its other arguments.
            outputs: [B, N, ...] of the linear layers that read its input.
        """
        roles = self.recurrence.roles[mixer.layer]

        def of_rows(values: Tensor) -> Tensor:
            return values[rows.to(values.device)]

        inputs = {name: of_rows(values) for name, values in inputs.items()}
        outputs = {name: of_rows(values) for name, values in outputs.items()}
        if self.recurrence.drafts_in_one:
            with self._sharing(_Linears(roles, None, lambda values, _: pick_nodes(values, nodes), outputs)):
                own = {name: pick_nodes(values, nodes) for name, values in inputs.items()}
                return mixer.run(own, others, before)[1]
        levels = Levels.of_paths(nodes)
        with self._sharing(_Linears(roles, None, levels.take, outputs)) as linears:
            return mixer.run_levels(inputs, others, before, levels, linears)[1][-1]


def list_linears(mixer: nn.Module) -> dict[nn.Module, str]:
    """The linear layers in a mixer (also quantised or adapted), outermost ones only, and their names."""
    found: dict[nn.Module, str] = {}
    for name, module in mixer.named_modules():
        if hasattr(module, "in_features") and not any(name.startswith(f"{outer}.") for outer in found.values()):
            found[module] = name
    return found


class Mixer:
    """Calls one mixer with the states that are wanted."""

    def __init__(self, forward: Callable[..., Any], layer: int) -> None:
        self.forward, self.layer = forward, layer
        self._names = [
            name
            for name, parameter in inspect.signature(forward).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Cache, dict[str, Tensor], dict[str, Any]] | None:
        """The cache of a call, its tensors of one row per token, and its other arguments; None for a call without a
        cache. Padding masks are left out: no padding is read."""
        named = dict(zip(self._names, args, strict=False)) | kwargs
        found = [name for name, value in named.items() if isinstance(value, Cache)]
        if not found:
            return None
        self._cache_name = found[0]  # the same at every call
        cache: Cache = named.pop(found[0])
        hidden = next(value for value in named.values() if isinstance(value, Tensor))
        named = {name: value for name, value in named.items() if "mask" not in name}
        inputs = {
            name: value
            for name, value in named.items()
            if isinstance(value, Tensor) and value.shape[:2] == hidden.shape[:2]
        }
        return cache, inputs, {name: value for name, value in named.items() if name not in inputs}

    def run(self, inputs: dict[str, Tensor], others: dict[str, Any], before: States | None) -> tuple[Any, States]:
        """One call: the mixer's outputs for tokens [R, P, ...], and the states after them.

        Args:
            before: the states [R, ...] before them, which are overwritten; None = nothing comes before.
        """
        layer = open_layer(before)
        # The mixer looks up its own layer; only this one is ever asked for.
        view = Cache(layers=[layer] * (self.layer + 1))
        return self.forward(**inputs, **others, **{self._cache_name: view}), read_layer(layer)

    def run_levels(
        self,
        inputs: dict[str, Tensor],
        others: dict[str, Any],
        before: States,
        levels: Levels,
        linears: _Linears | None = None,
        *,
        keeps_all: bool = False,
    ) -> tuple[list[Any], list[States]]:
        """A call for each level: the outputs of all of them, and the states after all, or only after the last.

        Args:
            inputs: of the nodes [B, N, ...].
            before: the states [B, ...] before the first level, which are overwritten.
            linears: is told the number of each call.
        """
        outputs: list[Any] = []
        after: list[States] = []
        states = before
        for level, parents in enumerate(levels.parents):
            if linears is not None:
                linears.call = level
            if parents is not None:
                states = {name: values.index_select(0, parents.to(values.device)) for name, values in states.items()}
            elif keeps_all:
                states = {name: values.clone() for name, values in states.items()}
            own = {name: levels.take(values, level) for name, values in inputs.items()}
            output, states = self.run(own, others, states)
            outputs.append(output)
            after = [*after, states] if keeps_all else [states]
        return outputs, after


def open_layer(states: States | None) -> Any:
    """A layer of transformers' cache with these states; None = an empty one."""
    names = states or {}
    layer: Any = _find_layer_class()(number_of_states=1 + max((number for _, number in names), default=0))
    for (kind, number), values in names.items():
        getattr(layer, f"{kind}_states")[number] = values
        getattr(layer, f"is_{kind}_states_initialized")[number] = True
        layer.has_previous_state[number] = True
        if kind == "conv":
            layer.conv_kernel_size[number] = values.shape[-1]
        layer.dtype, layer.device = values.dtype, values.device
    return layer


@functools.cache
def _find_layer_class() -> Any:
    from transformers.cache_utils import LinearAttentionLayer  # transformers 5.23; `find_recurrence` has looked

    class OneCall(LinearAttentionLayer):
        """For one call of a mixer: a new state takes the place of the old one, which transformers' layers copy."""

        def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
            if not self.is_recurrent_states_initialized[state_idx]:
                first: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
                return first
            held: Any = self.recurrent_states[state_idx]
            self.recurrent_states[state_idx] = found = recurrent_states.to(held.dtype)
            return found

    return OneCall


def read_layer(layer: Any) -> States:
    """The states in a layer of transformers' cache."""
    return {
        (kind, number): values
        for kind in ("conv", "recurrent")
        for number, values in getattr(layer, f"{kind}_states").items()
        if values is not None
    }


def _map(function: Callable[..., Any], output: Any, *others: Any) -> Any:
    """Applies `function` to the tensors of outputs that are a tensor, None, or a tuple of such."""
    if isinstance(output, tuple):
        return tuple(_map(function, *parts) for parts in zip(output, *others, strict=True))
    return function(output, *others) if isinstance(output, Tensor) else output


def _fill_output(group: Any, outputs: Tensor, found: Tensor) -> None:
    outputs[group.rows.to(outputs.device), : group.count] = found
