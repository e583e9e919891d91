"""Runs a model's recurrent layers so that their states can be rolled back.

A mixer is the module of a layer that keeps a recurrent or convolutional state (Mamba, gated delta rule, short
convolutions). The model runs as a copy that shares all weights and all modules except the mixers, which get their
states from `RecurrentStates`.

A state cannot be cut back to the accepted tokens, so a mixer reads the drafts from a copy of the state, and the accepted
tokens once more when they are known. Only its recurrence runs twice. The linear layers, which hold nearly all of its
weights, run once: those that read the mixer's input are recorded and played back, and the last one has nothing to do in
a replay. Attention, MLPs and experts run once.

A mixer reads several tokens in one call where that gives what transformers' passes of single tokens give; on a CPU, and
elsewhere, token by token. Its linear layers read all tokens at once in both cases.

In a tree, the rows of a mixer's batch are the paths from the root to the leaves. Linear layers still see each node once.

Legend: B batch, N tokens of a pass, R rows of a mixer's call, P tokens of each row, G rows that are replayed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from inference.cache.recurrent_states import RecurrentStates, States, StateSpec
from inference.targets.copied_modules import copy_module, replace_modules
from inference.targets.recurrent.plans import Drafting, Reading, pick_nodes

RunLinear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LinearRoles:
    """What the linear layers of a mixer read and give.

    Attributes:
        inputs: name of each layer that reads the mixer's input, times this number.
        output: name of the layer whose output is the mixer's; None if there is none.
    """

    inputs: dict[str, float] = field(default_factory=dict)
    output: str | None = None


@dataclass(frozen=True)
class Recurrence:
    """A model's recurrent layers.

    Attributes:
        mixers: number of each recurrent layer in the cache -> name of its mixer in the model.
        specs, roles: the states of each, and its linear layers.
        continues: whether a pass of several tokens continues from a state. If not, a prompt is read in one pass, and
            everything after it token by token.
        drafts_in_one: whether mixers read drafts in one call; else token by token, as transformers' generate does.
    """

    mixers: dict[int, str]
    specs: dict[int, tuple[StateSpec, ...]]
    roles: dict[int, LinearRoles]
    continues: bool = True
    drafts_in_one: bool = True


@dataclass
class _Linears:
    """The linear layers of one mixer while it reads rows of tokens [R, P]: they compute each node [B, N] once.

    Those that read the mixer's input run once, for all tokens. The last one waits for all tokens.

    Attributes:
        roles: of the layers.
        hidden: the mixer's input [B, N, D]; None in a replay, in which nobody reads the mixer's output.
        arrange: from nodes [B, N, ...] to rows [R, P, ...].
        outputs: [B, N, ...] of the layers that read the mixer's input, by name.
        step: the token of the present call; None = all tokens.
        waiting: the last layer, and its inputs [R, ...] so far.
    """

    roles: LinearRoles
    hidden: Tensor | None
    arrange: Callable[[Tensor], Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    step: int | None = None
    waiting: list[tuple[RunLinear, Tensor]] = field(default_factory=list)
    _arranged: dict[str, Tensor] = field(default_factory=dict)

    def run(self, name: str, module: Any, forward: RunLinear, values: Tensor) -> Tensor:
        """The output of layer `name` for its input in a call of the mixer."""
        if name == self.roles.output:
            self.waiting.append((forward, values))
            return values.new_zeros(*values.shape[:-1], module.out_features)
        factor = self.roles.inputs.get(name)
        if factor is None:
            return forward(values)
        if name not in self.outputs:
            assert self.hidden is not None, "a replay plays back what a pass has recorded"
            self.outputs[name] = forward(self.hidden if factor == 1.0 else self.hidden * factor)
        if name not in self._arranged:
            self._arranged[name] = self.arrange(self.outputs[name])
        arranged = self._arranged[name]
        return arranged if self.step is None else arranged[:, self.step : self.step + 1]

    def finish(self, outputs: Any, to_nodes: Callable[[Tensor], Tensor]) -> Any:
        """The mixer's outputs [B, N, ...] of its outputs [R, P, ...]."""
        if not self.waiting:
            return _map(to_nodes, outputs)
        forward = self.waiting[0][0]
        return forward(to_nodes(torch.cat([values for _, values in self.waiting], dim=1)))


@dataclass(frozen=True)
class _Record:
    """What a mixer has read in a pass over drafts: its inputs per token [B, N, ...], its other arguments, and the outputs
    [B, N, ...] of the linear layers that read its input."""

    layer: int
    inputs: dict[str, Tensor]
    others: dict[str, Any]
    outputs: dict[str, Tensor]


class _Current(threading.local):
    """How this thread's linear layers within a mixer run; None = as they are."""

    linears: _Linears | None = None


class PlacedMixers:
    """A model whose mixers can be rolled back.

    Attributes:
        causal_lm: the copy; without a cache that has states, it runs as the model does.
    """

    def __init__(self, causal_lm: nn.Module, recurrence: Recurrence) -> None:
        self.recurrence = recurrence
        self._current = _Current()
        self._mixers: dict[int, Mixer] = {}
        layers = {causal_lm.get_submodule(name): layer for layer, name in recurrence.mixers.items()}
        self.causal_lm = replace_modules(
            causal_lm, lambda part: self._place(part, layers[part]) if part in layers else None
        )

    def new_states(self, batch_size: int) -> RecurrentStates:
        return RecurrentStates(self.recurrence.specs, batch_size, self._replay)

    def _place(self, module: nn.Module, layer: int) -> nn.Module:
        names = list_linears(module)
        inner = replace_modules(module, lambda part: self._place_linear(names[part], part) if part in names else None)
        mixer = self._mixers[layer] = Mixer(inner.forward, layer)
        return copy_module(inner, forward=partial(self._run, mixer))

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
        if isinstance(states.plan, Reading):
            return self._read(mixer, states, inputs, others)
        return self._draft(mixer, states, inputs, others)

    def _read(self, mixer: Mixer, states: RecurrentStates, inputs: dict[str, Tensor], others: dict[str, Any]) -> Any:
        plan: Reading = states.plan
        outputs: Any = None
        for group in plan.groups:
            own = {name: values[group.rows.to(values.device), : group.count] for name, values in inputs.items()}
            before = None if group.is_first else states.take(mixer.layer, group.rows)
            found, after = mixer.run(own, others, before, in_one=group.is_first or self.recurrence.continues)
            states.put(mixer.layer, group.rows, after)
            if len(group.rows) == next(iter(inputs.values())).shape[0] and group.count == plan.num_tokens:
                return found
            outputs = _map(partial(_new_output, plan, inputs), found) if outputs is None else outputs
            _map(partial(_fill_output, group), outputs, found)
        return outputs

    def _draft(self, mixer: Mixer, states: RecurrentStates, inputs: dict[str, Tensor], others: dict[str, Any]) -> Any:
        plan: Drafting = states.plan
        hidden = next(iter(inputs.values()))
        own = {name: plan.to_paths(values) for name, values in inputs.items()}
        before = states.take(mixer.layer, plan.list_rows(hidden.device))
        with self._sharing(_Linears(self.recurrence.roles[mixer.layer], hidden, plan.to_paths)) as linears:
            found, after = mixer.run(own, others, before, in_one=self.recurrence.drafts_in_one, linears=linears)
        record = _Record(mixer.layer, inputs, others, linears.outputs)
        states.record(mixer.layer, record, after if plan.paths is None else None)
        return linears.finish(found, plan.to_nodes)

    @torch.no_grad()
    def _replay(self, record: _Record, rows: Tensor, nodes: Tensor, before: States) -> States:
        """The states after nodes [G, P] of rows [G] (see `RecurrentStates`)."""

        def arrange(values: Tensor) -> Tensor:
            return pick_nodes(values[rows.to(values.device)], nodes)

        inputs = {name: arrange(values) for name, values in record.inputs.items()}
        in_one = self.recurrence.drafts_in_one
        with self._sharing(_Linears(self.recurrence.roles[record.layer], None, arrange, record.outputs)) as linears:
            return self._mixers[record.layer].run(inputs, record.others, before, in_one=in_one, linears=linears)[1]


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

    def run(
        self,
        inputs: dict[str, Tensor],
        others: dict[str, Any],
        before: States | None,
        *,
        in_one: bool,
        linears: _Linears | None = None,
    ) -> tuple[Any, States]:
        """The mixer's outputs for tokens [R, P, ...], and the states after them.

        Args:
            before: the states [R, ...] before them, which are overwritten; None = nothing comes before.
            in_one: in one call; else token by token.
            linears: is told the token of each call.
        """
        layer = open_layer(before)
        # The mixer looks up its own layer; only this one is ever asked for.
        view = Cache(layers=[layer] * (self.layer + 1))
        others = others | {self._cache_name: view}
        num_tokens = next(iter(inputs.values())).shape[1]
        if in_one or num_tokens == 1:
            return self.forward(**inputs, **others), read_layer(layer)
        outputs = []
        for step in range(num_tokens):
            if linears is not None:
                linears.step = step
            token = {name: values[:, step : step + 1] for name, values in inputs.items()}
            outputs.append(self.forward(**token, **others))
        return _map(lambda *parts: torch.cat(parts, dim=1), *outputs), read_layer(layer)


def open_layer(states: States | None) -> Any:
    """A layer of transformers' cache with these states; None = an empty one."""
    from transformers.cache_utils import LinearAttentionLayer  # transformers 5.23; `find_recurrence` has looked

    names = states or {}
    layer: Any = LinearAttentionLayer(number_of_states=1 + max((number for _, number in names), default=0))
    for (kind, number), values in names.items():
        getattr(layer, f"{kind}_states")[number] = values
        getattr(layer, f"is_{kind}_states_initialized")[number] = True
        layer.has_previous_state[number] = True
        if kind == "conv":
            layer.conv_kernel_size[number] = values.shape[-1]
        layer.dtype, layer.device = values.dtype, values.device
    return layer


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


def _new_output(plan: Reading, inputs: dict[str, Tensor], output: Tensor) -> Tensor:
    """Zeros [B, N, ...] for outputs of a part of the rows."""
    return output.new_zeros(next(iter(inputs.values())).shape[0], plan.num_tokens, *output.shape[2:])


def _fill_output(group: Any, outputs: Tensor, found: Tensor) -> None:
    outputs[group.rows.to(outputs.device), : group.count] = found
