"""Finds a model's recurrent layers by running it, and proves that their states can be rolled back.

Legend: T tokens, D width of a mixer's input, V target vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from draftsmith.inference.cache.recurrent_states import States, StateSpec
from draftsmith.inference.targets.forward_names import ForwardNames
from draftsmith.inference.targets.model_config import is_recurrent
from draftsmith.inference.targets.recurrent.plans import Levels
from draftsmith.inference.targets.recurrent.replayable_layers import (
    LinearRoles,
    Mixer,
    Recurrence,
    list_linears,
    open_layer,
    read_layer,
)
from draftsmith.inference.targets.refusals import CannotRollBackError, is_single, refusing

_NUM_TOKENS = 12  # more than the kernels of the models' convolutions, and cut in three parts


class _Probe(Cache):
    """Hands keys and values back, has layers for recurrent states, and notes which module asked for them."""

    def __init__(self, running: list[nn.Module]) -> None:
        super().__init__(layers=[])
        self.running = running
        self.mixers: dict[int, nn.Module] = {}
        self.own: dict[int, Any] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override, unused-ignore]
        return keys, values

    def _open(self, layer_idx: int) -> Any:
        if self.mixers.setdefault(layer_idx, self.running[-1]) is not self.running[-1]:
            raise CannotRollBackError(f"two modules keep a state in layer {layer_idx} of the cache")
        return self.own.setdefault(layer_idx, open_layer(None))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._open(layer_idx)

    get_recurrent_state = get_conv_state

    def update_conv_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:  # type: ignore[override, unused-ignore]
        return self._open(layer_idx).update_conv_state(states, state_idx, **kwargs)

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:  # type: ignore[override, unused-ignore]
        return self._open(layer_idx).update_recurrent_state(states, state_idx, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


@torch.no_grad()
def find_recurrence(causal_lm: Any, device: torch.device) -> Recurrence | None:
    """The model's recurrent layers; None for a model without any.

    Raises:
        ValueError: they cannot be rolled back, with the reason.
    """
    if not is_recurrent(causal_lm):
        return None
    name = type(causal_lm).__name__
    cannot = f"{name} has recurrent layers that cannot be rolled back after a rejected draft"
    try:
        open_layer(None)
    except ImportError as error:
        raise ValueError(f"{cannot}: this release of transformers has no cache for them, 5.23 has: {error}") from error
    vocab_size: int = causal_lm.get_input_embeddings().weight.shape[0]
    token_ids = torch.arange(1, 1 + _NUM_TOKENS, device=device)[None] % vocab_size
    running: list[nn.Module] = []
    probe = _Probe(running)
    calls: dict[nn.Module, Any] = {}
    outputs: dict[nn.Module, list[Any]] = {}
    with (
        refusing(f"{cannot}: they do not run with transformers' cache for such layers"),
        _watching(causal_lm, running, calls, outputs),
    ):
        causal_lm.base_model(
            **ForwardNames(causal_lm.base_model).name(token_ids, None, None, probe),
            use_cache=True,
            # transformers adds hooks when states are first asked for: before the layers that a copy shares are copied.
            output_hidden_states=True,
            return_dict=True,
        )
    if not probe.mixers:
        raise ValueError(f"{cannot}: they keep their states in a place of their own instead of the cache")
    names = {module: path for path, module in causal_lm.named_modules()}
    mixers = {layer: names[module] for layer, module in sorted(probe.mixers.items())}
    specs = {layer: tuple(_describe(read_layer(probe.own[layer]))) for layer in mixers}
    continues = drafts_in_one = True
    for layer, module in sorted(probe.mixers.items()):
        args, kwargs = calls[module]
        with refusing(f"{cannot}: {mixers[layer]} does not continue from a state"):
            mixer = Mixer(module.forward, layer)
            whole, steps, fresh = _continue_in_three_ways(mixer, args, kwargs)
        continues = continues and _is_close(whole, fresh, causal_lm)
        drafts_in_one = drafts_in_one and continues and _is_close(whole, steps, causal_lm)
    roles = {layer: _find_roles(module, calls, outputs) for layer, module in probe.mixers.items()}
    # On a CPU, the forms for several tokens pad a few of them to chunks of 64 to 256. Convolutions have no chunks.
    has_chunks = any(spec.name[0] == "recurrent" for own in specs.values() for spec in own)
    drafts_in_one = drafts_in_one and not (device.type == "cpu" and has_chunks)
    return Recurrence(mixers, specs, roles, continues, drafts_in_one)


def _find_roles(mixer: nn.Module, calls: dict[nn.Module, Any], outputs: dict[nn.Module, list[Any]]) -> LinearRoles:
    """The roles of a mixer's linear layers, by what they read and gave."""
    args, kwargs = calls[mixer]
    hidden: Tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    inputs, last = set(), None
    for module, name in list_linears(mixer).items():
        if len(outputs.get(module, ())) != 1:
            continue
        values: Tensor = next(iter((*calls[module][0], *calls[module][1].values())))
        if outputs[module][0] is outputs[mixer][-1]:
            last = name
        elif values.shape == hidden.shape and torch.equal(values, hidden):
            inputs.add(name)
    return LinearRoles(frozenset(inputs), last)


@contextmanager
def _watching(
    model: nn.Module, running: list[nn.Module], calls: dict[nn.Module, Any], outputs: dict[nn.Module, list[Any]]
) -> Iterator[None]:
    """While active, `running` holds the modules whose forward is running, `calls` the arguments of each module's last
    call, and `outputs` what its calls gave."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(module)
        calls[module] = args, kwargs

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()
        outputs.setdefault(module, []).append(output)

    handles = [
        handle
        for module in model.modules()
        for handle in (module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _describe(states: States) -> Iterator[StateSpec]:
    for name, values in states.items():
        yield StateSpec(name, tuple(values.shape[1:]), values.dtype, values.device)


def _continue_in_three_ways(mixer: Mixer, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The mixer's outputs [T, ...] for the later tokens of a call: in one call from the state before them, token by
    token from there, and within the whole text."""
    call = mixer.bind(args, kwargs)
    if call is None:
        raise CannotRollBackError("a mixer that is called without the cache keeps a state in it")
    _, inputs, others = call
    half = _NUM_TOKENS // 2
    first, later = (
        {name: values[:, span] for name, values in inputs.items()} for span in (slice(half), slice(half, None))
    )
    fresh = _first_tensor(mixer.run(inputs, others, None)[0])[:, half:]
    whole = _first_tensor(mixer.run(later, others, mixer.run(first, others, None)[1])[0])
    levels = Levels.of_paths(torch.arange(half)[None])
    steps, _ = mixer.run_levels(later, others, mixer.run(first, others, None)[1], levels)
    return whole, torch.cat([_first_tensor(step) for step in steps], dim=1), fresh


def _first_tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else _first_tensor(output[0])


def _is_close(found: Tensor, wanted: Tensor, causal_lm: Any) -> bool:
    """Whether two ways to compute the same states agree up to rounding."""
    difference, size = (float(values.float().norm()) for values in (found - wanted, wanted))
    return difference <= (3e-5 if is_single(wanted, causal_lm) else 0.02) * size
