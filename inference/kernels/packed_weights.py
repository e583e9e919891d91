"""Packed weights: copies of a model's matrices in the order in which oneDNN's kernels read them.

On a CPU torch's product of one row with a bfloat16 matrix reads memory at a third to a half of its speed, and products
of a few rows read no faster than they compute. oneDNN's kernels for packed weights read at full speed, fastest at four
rows and more.

Layers that read the same input, such as q, k and v, are packed as one matrix: one product takes less time than three.
"""

from __future__ import annotations

import copy
import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEAST_ROWS = 4  # fewer are padded: products of one to three rows take as long or longer
# Names of layers that read the same input, in the order of their calls. A module's `read_together` says otherwise.
READ_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Names of attention whose queries and keys have different inputs. Keys and values are computed once for a text.
_CROSS_ATTENTION = re.compile(r"(cross\w*|encoder_attn)$")
_ORIGIN = "_module_of_twin"
_MERGED = "_merged_in_twin"
_ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "scaling")  # of PEFT's layers
M = TypeVar("M", bound=nn.Module)


def pack(module: M) -> M:
    """A twin of `module` whose linear layers on the CPU have packed weights. Everything else is shared with `module`,
    which stays as it is.

    The twin keeps the weights of this moment.
    """
    twin = make_twin(module, lambda part: PackedLinear if _can_pack(part) else type(part))
    for part in twin.modules():
        if isinstance(part, PackedLinear):
            part.matrix, part.place = PackedMatrix([part.weight], [part.bias]), 0
    for path, part in twin.named_modules():
        if not _CROSS_ATTENTION.search(path):
            for names in getattr(part, "read_together", READ_TOGETHER):
                _join([part._modules.get(name) for name in names])
    return twin


def repack(module: nn.Module) -> None:
    """Packs the weights of a packed module again, in place: they have changed."""
    layers: dict[PackedMatrix, list[PackedLinear]] = {}
    for part in module.modules():
        if isinstance(part, PackedLinear):
            layers.setdefault(part.matrix, []).append(part)
    for matrix, parts in layers.items():
        parts.sort(key=lambda part: part.place)
        matrix.fill([part.weight for part in parts], [part.bias for part in parts])


def make_twin(module: M, find_kind: Callable[[nn.Module], type[nn.Module]]) -> M:
    """A module that shares all parameters and buffers with `module`, and whose parts have the classes that `find_kind`
    gives for them."""
    twins: dict[int, nn.Module] = {}  # by the id of their module

    def twin_of(part: nn.Module) -> nn.Module:
        if id(part) not in twins:
            kind = find_kind(part)
            twin = twins[id(part)] = kind.__new__(kind)
            # Dictionaries of hooks may change on one side: transformers hooks the layers whose states it hands out.
            for name, value in vars(part).items():
                vars(twin)[name] = copy.copy(value) if isinstance(value, dict) else value
            vars(twin)[_ORIGIN] = vars(part).get(_ORIGIN, part)  # not a part of the twin
            vars(twin)[_MERGED] = tuple(vars(part).get("merged_adapters", ()))
            children = part._modules.items()
            twin._modules = {name: None if child is None else twin_of(child) for name, child in children}
        return twins[id(part)]

    return twin_of(module)  # type: ignore[return-value]


def follow_adapters(module: nn.Module) -> None:
    """Lets a twin have the active adapters of the module that it was made of.

    Raises:
        ValueError: that module has other parts now, such as a new adapter, or an adapter was merged.
    """
    if _ORIGIN not in vars(module):
        return
    for part in module.modules():
        origin = vars(part)[_ORIGIN]
        own = {name: child if child is None else vars(child)[_ORIGIN] for name, child in part._modules.items()}
        if own != origin._modules or vars(part)[_MERGED] != tuple(vars(origin).get("merged_adapters", ())):
            raise ValueError(
                "the model has other parts than when its weights were packed or split, such as a new or a merged "
                "adapter: make a new Decoder"
            )
        vars(part).update((name, vars(origin)[name]) for name in _ADAPTER_STATE if name in vars(origin))


def _can_pack(module: nn.Module) -> bool:
    """Whether this is a plain linear layer on the CPU, not one that a hook or a quantiser has changed."""
    is_linear = type(module) is nn.Linear or "most_rows" in vars(module)  # or `SplitLinear`
    if not is_linear or "forward" in vars(module) or type(module.weight) is not nn.Parameter:
        return False
    if module.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return module.weight.dtype == torch.float32 or (module.weight.dtype == torch.bfloat16 and has_bfloat16())


def has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices on this CPU; where it cannot, float32 is up to 30 times as fast."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def can_pack(module: nn.Module) -> bool:
    """Whether a part of `module` can have packed weights."""
    return any(_can_pack(part) for part in module.modules())


def is_packed(module: nn.Module) -> bool:
    """Whether a part of `module` has packed weights."""
    return any(type(part) is PackedLinear for part in module.modules())


def _join(layers: Sequence[nn.Module | None]) -> None:
    """Packs these layers as one matrix, if they are packed and have inputs of one width."""
    packed = [layer for layer in layers if type(layer) is PackedLinear]
    kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in packed}
    if len(packed) < len(layers) or len(kinds) > 1 or any(len(layer.matrix.sizes) > 1 for layer in packed):
        return
    matrix = PackedMatrix([layer.weight for layer in packed], [layer.bias for layer in packed])
    for place, layer in enumerate(packed):
        layer.matrix, layer.place = matrix, place


class PackedLinear(nn.Linear):
    """A linear layer with a packed copy of its weight: all of a matrix, or a part at this place."""

    matrix: PackedMatrix
    place: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """input [..., in_features] -> [..., out_features]. No gradient passes through."""
        product = self.matrix.product(input, self.place) if input.dtype == self.weight.dtype else None
        return F.linear(input, self.weight, self.bias) if product is None else product


class PackedMatrix:
    """The packed weights of layers that read the same input, one below the other.

    The first layer's call computes the products of all of them, and the others' calls find theirs, if they are given
    the very same tensor. Products live no longer than their input.

    Args:
        weights: [out_features, in_features] of each layer. biases: [out_features] of each, or None for all.

    Attributes:
        most_rows: of one product; None = any number.
    """

    most_rows: int | None = None

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self.sizes = [len(weight) for weight in weights]
        self.fill(weights, biases)
        self.number = next(_NUMBERS)
        self._name = f"products of matrix {self.number}"
        self._traced: dict[str, tuple[Tensor | None, Sequence[Tensor]]] = {}  # as `product` keeps them
        _MATRICES[self.number] = self

    @torch.no_grad()
    def fill(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        """Packs these weights."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(list(weights)).contiguous(), 16)
        known = [bias for bias in biases if bias is not None]
        self.bias = torch.cat(known) if known else None

    def limited(self, most_rows: int) -> PackedMatrix:
        """The same matrix, which multiplies at most so many rows at a time."""
        twin = copy.copy(self)
        twin.most_rows, twin.number, twin._traced = most_rows, next(_NUMBERS), {}
        twin._name = f"products of matrix {twin.number}"
        _MATRICES[twin.number] = twin
        return twin

    def product(self, given: Tensor, place: int) -> Tensor | None:
        """given [..., in_features] -> [..., sizes[place]]; None = the first layer was not given this tensor."""
        if len(self.sizes) == 1:
            return self._multiply(given)[0]
        is_traced = torch.compiler.is_compiling()
        known = self._traced if is_traced else vars(given)  # torch.compile traces no attributes of tensors
        if place == 0:
            known[self._name] = given if is_traced else None, self._multiply(given)
        source, products = known.get(self._name, (None, None))
        if place == len(self.sizes) - 1:
            known.pop(self._name, None)
        return None if products is None or (is_traced and source is not given) else products[place]

    def _multiply(self, given: Tensor) -> Sequence[Tensor]:
        """The products of all layers."""
        rows = given.reshape(-1, given.shape[-1])
        if torch.compiler.is_compiling():
            joined: Tensor = _multiply_by_number(rows, self.number, sum(self.sizes))
        else:
            joined = _multiply(rows, self)
        joined = joined.view(*given.shape[:-1], sum(self.sizes))
        return joined.split(self.sizes, dim=-1) if len(self.sizes) > 1 else (joined,)


_NUMBERS = itertools.count()
_MATRICES: weakref.WeakValueDictionary[int, PackedMatrix] = weakref.WeakValueDictionary()


def split_evenly(rows: Tensor, most: int) -> tuple[Tensor, ...]:
    """Parts of at most `most` rows, and of half as many at least: very few rows have kernels of their own."""
    return rows.tensor_split(-(-len(rows) // most))


def _multiply(rows: Tensor, matrix: PackedMatrix) -> Tensor:
    count, most = rows.shape[0], matrix.most_rows
    if most is not None and count > most:
        return torch.cat([_multiply(part, matrix) for part in split_evenly(rows, most)])
    if count < LEAST_ROWS:
        rows = F.pad(rows, (0, 0, 0, LEAST_ROWS - count))
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, matrix.packed, matrix.bias, "none", [], "")
    return product[:count] if count < LEAST_ROWS else product


@torch.library.custom_op("draftsmith::packed_linear", mutates_args=())
def _multiply_by_number(rows: Tensor, number: int, out_features: int) -> Tensor:
    """For compiled code, which does not take packed tensors."""
    return _multiply(rows, _MATRICES[number]).contiguous()


@_multiply_by_number.register_fake
def _(rows: Tensor, number: int, out_features: int) -> Tensor:
    return rows.new_empty(rows.shape[0], out_features)
