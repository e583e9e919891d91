"""From a target's last hidden states to its logits, and the LM head's weight as a tensor.

Legend: D width of the states that the LM head reads, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ScaleLogits = Callable[[Tensor], Tensor]
_ROWS = 256  # rows of the identity matrix that go through the LM head at a time


def run_frozen(lm_head: Any, hidden: Tensor) -> Tensor:
    """The LM head's output [..., V] for [..., D]. Gradients reach `hidden` only: the head is frozen, whatever its
    parameters' `requires_grad` says."""
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

    Raises:
        ValueError: the head does not map D to V.
    """
    weight: Tensor = lm_head.weight
    is_stored = type(lm_head) is nn.Linear and type(weight) is nn.Parameter and not weight.is_meta
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


def find_logit_scaling(config: Any, lm_head: Any, hidden: Tensor, logits: Tensor) -> ScaleLogits | None:
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
        scale = _LogitScaling(factor, cap)
        if raw.shape == logits.shape and torch.allclose(scale(raw).float(), logits.float(), rtol=1e-3, atol=1e-3):
            return scale
    return None


@dataclass(frozen=True)
class _LogitScaling:
    """logits = cap * tanh(raw * factor / cap), in the models' own order of operations and dtype."""

    factor: float
    cap: float | None

    def __call__(self, raw: Tensor) -> Tensor:
        logits = raw if self.factor == 1.0 else raw * self.factor
        if self.cap is None:
            return logits
        return torch.tanh(logits / self.cap) * self.cap
