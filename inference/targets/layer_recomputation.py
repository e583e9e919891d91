"""Gradient checkpointing for the layers of a model that stays in evaluation mode.

transformers checkpoints layers in training mode alone, in which a target's passes would not be those of decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def recomputed_layers(model: nn.Module, while_again: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """While active, the layers of `model` keep their inputs alone, and run again in the backward pass.

    Args:
        while_again: makes what is active while they run again: what is around the pass itself is not by then.

    Raises:
        ValueError: a model none of whose layers transformers could checkpoint.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that can be run again: leave gradient_checkpointing out"
        )

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), while_again()

    hooked = {layer: vars(layer)["forward"] for layer in layers if "forward" in vars(layer)}  # by accelerate
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
        for layer, forward in hooked.items():
            layer.forward = forward
