"""Packed weights: copies of a model's matrices in the order in which oneDNN's kernels read them.

On a CPU torch's product of one row with a bfloat16 matrix reads memory at a third to a half of its speed, and products
of a few rows read no faster than they compute. oneDNN's kernels for packed weights read at full speed, fastest at four
rows and more.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEAST_ROWS = 4  # fewer are padded: products of one to three rows take as long or longer
M = TypeVar("M", bound=nn.Module)


def pack(module: M, known: dict[int, nn.Module] | None = None) -> M:
    """A twin of `module` whose linear layers on the CPU have packed weights. Everything else is shared with `module`,
    which stays as it is.

    The twin keeps the weights, and the active adapters, of this moment.

    Args:
        known: twins made so far, by the id of their module.
    """
    known = {} if known is None else known
    if id(module) not in known:
        kind: type[nn.Module] = PackedLinear if _can_pack(module) else type(module)
        twin = known[id(module)] = kind.__new__(kind)
        # Dictionaries of hooks may change on one side: transformers hooks the layers whose states it hands out.
        parts = vars(module).items()
        vars(twin).update({name: copy.copy(part) if isinstance(part, dict) else part for name, part in parts})
        if isinstance(twin, PackedLinear):
            twin.pack()
        twin._modules = {name: child and pack(child, known) for name, child in module._modules.items()}
    return known[id(module)]  # type: ignore[return-value]


def _can_pack(module: nn.Module) -> bool:
    """Whether this is a plain linear layer on the CPU, not one that a hook or a quantiser has changed."""
    if type(module) is not nn.Linear or "forward" in vars(module) or type(module.weight) is not nn.Parameter:
        return False
    if module.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    has_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return module.weight.dtype == torch.float32 or (module.weight.dtype == torch.bfloat16 and has_bf16)


def is_packed(module: nn.Module) -> bool:
    """Whether a part of `module` has packed weights."""
    return any(type(part) is PackedLinear for part in module.modules())


class PackedLinear(nn.Linear):
    """A linear layer with a packed copy of its weight."""

    def pack(self) -> None:
        with torch.no_grad():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().contiguous(), 16)
        self.number = next(_NUMBERS)
        _LAYERS[self.number] = self

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """input [..., in_features] -> [..., out_features]. No gradient passes through."""
        if input.dtype != self.weight.dtype:
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        if torch.compiler.is_compiling():
            product: Tensor = _multiply_by_number(rows, self.number, self.out_features)
        else:
            product = _multiply(rows, self)
        return product.view(*input.shape[:-1], self.out_features)


_NUMBERS = itertools.count()
_LAYERS: weakref.WeakValueDictionary[int, PackedLinear] = weakref.WeakValueDictionary()


def _multiply(rows: Tensor, layer: PackedLinear) -> Tensor:
    count = rows.shape[0]
    if count < LEAST_ROWS:
        rows = F.pad(rows, (0, 0, 0, LEAST_ROWS - count))
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, layer.packed, layer.bias, "none", [], "")
    return product[:count]


@torch.library.custom_op("draftsmith::packed_linear", mutates_args=())
def _multiply_by_number(rows: Tensor, number: int, out_features: int) -> Tensor:
    """For compiled code, which does not take packed tensors."""
    return _multiply(rows, _LAYERS[number]).contiguous()


@_multiply_by_number.register_fake
def _(rows: Tensor, number: int, out_features: int) -> Tensor:
    return rows.new_empty(rows.shape[0], out_features)
