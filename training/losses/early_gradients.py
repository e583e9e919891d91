"""Computes gradients of a loss while its logits exist, so that the backward pass neither keeps nor recomputes logits.

The loss is a sum of chunks, each a function of its own rows and of shared parameters. Their gradients are added up
chunk by chunk. The backward pass multiplies them by the incoming gradient in place, and gives them away: a parameter
without a gradient takes the tensor itself. A large LM head so has one gradient in memory, not two.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class EarlyGradients:
    """Adds up a loss and its gradients."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._inputs: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._places: dict[int, int] = {}  # id of an input -> its index, for inputs that chunks share

    def add(self, loss: Tensor, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Adds a chunk's loss (a scalar) and its gradient with respect to each of its inputs."""
        self._total = loss.detach() if self._total is None else self._total + loss.detach()
        for leaf, gradient in gradients:
            if (place := self._places.setdefault(id(leaf), len(self._inputs))) == len(self._inputs):
                self._inputs.append(leaf)
                self._gradients.append(gradient)
            else:
                self._gradients[place] += gradient

    def loss(self) -> Tensor | None:
        """Returns the sum in the graph of the inputs; None if nothing was added."""
        if self._total is None:
            return None
        return cast(Tensor, _KnownGradients.apply(self._total, self._gradients, *self._inputs))


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients  # not saved for backward, which would hold them while parameters take them
        return value.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given: list[Tensor | None] = []
        if not ctx.gradients:
            raise RuntimeError("the gradients of this loss were taken by an earlier backward pass: compute it again")
        while ctx.gradients:  # one at a time, so that the list does not hold what it gives
            given.append(ctx.gradients.pop(0).mul_(grads[0]))
        return None, None, *given


def find_leaves(output: Tensor) -> list[Tensor]:
    """Returns the leaves of an output's graph: parameters and detached tensors."""
    leaves: list[Tensor] = []
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves
