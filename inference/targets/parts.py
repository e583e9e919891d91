"""Parts of a target that drafters use by themselves: its LM head, its final norm, its first layers.

Legend: D width of the states that the LM head reads, V target vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.inference.kernels.packed_weights import PackedLinear
from draftsmith.inference.kernels.split_rows import SplitLinear
from draftsmith.inference.targets.model_config import find_device
from draftsmith.inference.targets.refusals import draw_ids, is_single, refusing, relative_error

_ROWS = 256  # rows of the identity matrix that go through the LM head at a time


def run_frozen(lm_head: Any, hidden: Tensor) -> Tensor:
    """The LM head's output [..., V] for [..., D]. Gradients reach `hidden` only."""
    weights = list(lm_head.parameters())
    is_offloaded = any(weight.is_meta for weight in weights)  # accelerate then gives the head copies of them
    if torch.is_grad_enabled() and not is_offloaded and any(weight.requires_grad for weight in weights):
        frozen = {name: weight.detach() for name, weight in lm_head.named_parameters()}
        computed: Tensor = torch.func.functional_call(lm_head, frozen, hidden)
        return computed
    logits: Tensor = lm_head(hidden)
    return logits.to(hidden.device)


@torch.no_grad()  # not inference mode, in which some quantised weights do not run
def read_weight(lm_head: Any, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The LM head's weight, of `shape` [V, D].

    A weight that is quantised, offloaded, adapted or split over processes is read by running the head on an identity
    matrix; any other is the stored tensor.
    """
    weight: Tensor = lm_head.weight
    is_stored = (
        type(lm_head) in (nn.Linear, PackedLinear, SplitLinear) and type(weight) is nn.Parameter and not weight.is_meta
    )
    if is_stored and weight.dtype == dtype and weight.shape == shape:
        return weight.detach().to(device)
    identity = torch.eye(shape[1], dtype=dtype, device=device)
    try:
        bias: Tensor = lm_head(torch.zeros_like(identity[:1]))
        columns = torch.cat([lm_head(part) - bias for part in identity.split(_ROWS)])
    except RuntimeError as error:
        raise ValueError(f"the target's LM head does not read states of {shape[1]} numbers: {error}") from error
    if columns.shape != shape[::-1]:
        raise ValueError(f"the target's LM head gives {columns.shape[1]} logits where {shape[0]} are expected")
    return columns.T.to(device)


def find_logit_scaling(config: Any, lm_head: Any, hidden: Tensor, logits: Tensor) -> LogitScaling | None:
    """The scaling that turns the LM head's output for `hidden` [1, 2, D] into the model's `logits` [1, 2, V], or None.

    The names in the config do not suffice: `logits_scaling` divides in Granite and multiplies in HyperCLOVA X.
    """
    try:
        raw: Tensor = lm_head(hidden).to(logits.device)
    except RuntimeError:  # another width: the model has more layers before its head
        return None
    cap = getattr(config, "final_logit_softcapping", None)
    factors = [1.0]
    for key in ("logit_scale", "lm_head_multiplier", "logits_scaling"):
        value = getattr(config, key, None)
        if isinstance(value, (int, float)) and value not in (0, 1):
            factors += [float(value), 1.0 / float(value)]
    for factor in factors:
        scale = LogitScaling(factor, cap)
        if raw.shape == logits.shape and torch.allclose(scale(raw).float(), logits.float(), rtol=1e-3, atol=1e-3):
            return scale
    return None


@dataclass(frozen=True)
class LogitScaling:
    """logits = cap * tanh(raw * factor / cap), in the models' own order of operations and dtype."""

    factor: float
    cap: float | None

    @property
    def is_plain(self) -> bool:
        """Whether the logits are what the LM head gives."""
        return self.factor == 1.0 and self.cap is None

    def __call__(self, raw: Tensor) -> Tensor:
        logits = raw if self.factor == 1.0 else raw * self.factor
        if self.cap is None:
            return logits
        return torch.tanh(logits / self.cap) * self.cap


def find_final_norm(causal_lm: Any) -> nn.Module | None:
    """The norm between the last layer and the LM head, or None when there is no such norm."""
    norms = [
        child
        for child in causal_lm.get_decoder().children()
        if "norm" in type(child).__name__.lower() and getattr(child, "weight", None) is not None
    ]
    return norms[-1] if norms else None


@torch.no_grad()
def find_final_norm_gain(causal_lm: Any) -> Tensor | None:
    """The factor of each channel in the model's final norm ([D], its dtype), or None when there is no such norm.

    It is measured by running the norm: some norms add one to their weight (Gemma), some subtract the mean.
    """
    norm: Any = find_final_norm(causal_lm)
    if norm is None:
        return None
    signs = torch.ones(norm.weight.shape, dtype=norm.weight.dtype, device=find_device(norm))
    signs[1::2] = -1  # mean 0 and root mean square 1, which normalising does not change
    gain: Tensor = (norm(signs) - norm(-signs)) * signs / 2
    return gain


def count_layer_parameters(causal_lm: Any) -> float:
    """Parameters of a decoder layer, the mean of those that are in memory; all experts count, and quantised weights as
    many as they stand for."""
    stacks = [child for child in causal_lm.get_decoder().children() if isinstance(child, nn.ModuleList) and len(child)]
    return max((sum(map(_count_own, stack.modules())) / len(stack) for stack in stacks), default=0.0)


def _count_own(module: nn.Module) -> int:
    sizes: list[Any] = [getattr(module, name, None) for name in ("in_features", "out_features")]
    if None not in sizes and not any(module.children()):
        return int(sizes[0] * sizes[1])
    return sum(weight.numel() for weight in module.parameters(recurse=False))


def take_first_layers(causal_lm: Any, num_layers: int) -> nn.Module:
    """The decoder cut off after its first layers: the same modules, without the later layers and the final norm.

    Raises:
        ValueError: the model has no such layers, or the output differs from its hidden_states[num_layers].
    """
    name, decoder = type(causal_lm).__name__, causal_lm.get_decoder()
    total = causal_lm.config.get_text_config().num_hidden_layers
    if not 0 < num_layers < total:
        raise ValueError(f"asked for the first {num_layers} layers of {name}; allowed is 1 to {total - 1}")
    final_norm = find_final_norm(causal_lm)
    first: Any = copy.copy(decoder)
    first._modules = dict(decoder._modules)  # the decoder's own stays as it is
    first.__dict__.pop("forward", None)  # accelerate's would run the decoder itself
    for key, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == total:
            first._modules[key] = child[:num_layers]
        elif child is final_norm:
            first._modules[key] = nn.Identity()
    token_ids = draw_ids(causal_lm, 1, find_device(causal_lm.get_input_embeddings()))
    with refusing(f"{name} does not run with its first {num_layers} layers only"), torch.no_grad():
        found = first(input_ids=token_ids, use_cache=False, return_dict=True).last_hidden_state
        states = decoder(input_ids=token_ids, use_cache=False, output_hidden_states=True, return_dict=True)
    wanted = states.hidden_states[num_layers]
    difference = relative_error(found, wanted)
    if not difference <= (1e-4 if is_single(wanted, causal_lm) else 1e-2):
        raise ValueError(
            f"the first {num_layers} layers of {name} give other states by themselves than within the whole model "
            f"(they differ by {difference:.2g})"
        )
    return first  # type: ignore[no-any-return]
