"""Products whose rows do not depend on their number, where this machine's kernels add a row's numbers in another order
when there are more rows: AMX's from 33 rows on, MKL's for float32 from about 9 rows on, cuBLAS's at many numbers.

On a CPU a product gets a few rows at a time; on CUDA it is a Triton kernel (`triton_linear.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.inference.kernels.attention import can_use_kernel
from draftsmith.inference.kernels.packed_weights import PackedLinear, PackedMatrix, make_twin, split_evenly

# Most rows of a product, None = any number, with the least that are tried: products are split evenly.
_TILES: dict[int | None, Sequence[int]] = {None: (1, 2, 4, 8, 12, 16, 32), 32: (1, 2, 4, 8, 12, 16), 8: (1, 2, 4)}
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 17, 31, 32, 33, 64, 129)  # rows that are compared
_BLOCKS = 4  # products of each number of rows
_MOST_WEIGHTS = 1 << 22  # of a matrix that is tried: larger ones with fewer outputs
M = TypeVar("M", bound=nn.Module)


class SplitLinear(nn.Linear):
    """A linear layer that multiplies at most `most_rows` rows at a time."""

    most_rows: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """input [..., in_features] -> [..., out_features]."""
        rows = input.reshape(-1, input.shape[-1])
        if len(rows) <= self.most_rows:
            return F.linear(input, self.weight, self.bias)
        parts = [F.linear(part, self.weight, self.bias) for part in split_evenly(rows, self.most_rows)]
        return torch.cat(parts).view(*input.shape[:-1], -1)


@dataclass(frozen=True)
class Rows:
    """Numbers of rows of a product with which no row depends on their number; most: None = any number."""

    least: int
    most: int | None


def fix_rows(module: M, dtype: torch.dtype, device: torch.device) -> M | None:
    """A twin of `module` in which no row of a product depends on their number, if there are enough of them; None = the
    module's own are like this, or nothing here can replace them."""
    if can_use_kernel(device):
        from draftsmith.inference.kernels import triton_linear

        return triton_linear.use_triton(module)
    rows = find_rows(module, dtype) if device.type == "cpu" else None
    return None if rows is None or rows.most is None else split_rows(module, rows.most)


def split_rows(module: M, most_rows: int) -> M:
    """A twin of `module` whose linear layers, packed ones too, multiply at most so many rows at a time."""
    twin = make_twin(module, lambda part: SplitLinear if _is_plain(part) else type(part))
    limited: dict[int, PackedMatrix] = {}
    for part in twin.modules():
        if isinstance(part, SplitLinear):
            part.most_rows = most_rows
        elif isinstance(part, PackedLinear):
            if id(part.matrix) not in limited:
                limited[id(part.matrix)] = part.matrix.limited(most_rows)
            part.matrix = limited[id(part.matrix)]
    return twin


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and "forward" not in vars(module)


def find_rows(module: nn.Module, dtype: torch.dtype) -> Rows | None:
    """What the products with a module's matrices need on this CPU; None = rows depend on their number in any case."""
    linear, packed, others = set[tuple[int, int]](), set[tuple[int, int]](), set[tuple[int, int]]()
    for part in module.modules():
        kind = packed if isinstance(part, PackedLinear) else linear if isinstance(part, nn.Linear) else others
        for weight in part.parameters(recurse=False):
            if weight.dim() == 2 and weight.is_floating_point() and not isinstance(part, nn.Embedding):
                outputs, inputs = weight.shape
                kind.add((inputs, outputs))
                if kind is others:  # such as GPT-2's, which are the other way round
                    kind.add((outputs, inputs))
    own, of_packed, other = (
        _find_rows(dtype, frozenset(shapes), torch.get_num_threads()) for shapes in (linear, packed, others)
    )
    if own is None or of_packed is None or other is None or other.most is not None:  # only linear layers are split
        return None
    least = max(own.least, other.least)  # products with packed weights have enough rows in any case
    return Rows(least, own.most or of_packed.most)


@cache
def _find_rows(dtype: torch.dtype, shapes: frozenset[tuple[int, int]], num_threads: int) -> Rows | None:
    """num_threads: torch's, which choose other kernels."""
    tried = (Rows(least, most) for most, leasts in _TILES.items() for least in leasts)
    return next((rows for rows in tried if all(_are_alike(dtype, rows, *shape) for shape in shapes)), None)


def _are_alike(dtype: torch.dtype, rows: Rows, inputs: int, outputs: int) -> bool:
    """Whether products with so many rows are alike in every row. Sums of numbers that cancel each other show whenever
    they are added in another order."""
    outputs = min(outputs, _MOST_WEIGHTS // inputs)
    generator = torch.Generator().manual_seed(0)
    counts = [count for count in _COUNTS if rows.least <= count <= (rows.most or count)]
    third = inputs // 3
    large, small = torch.randn(counts[-1], inputs - third, generator=generator).split([third, inputs - 2 * third], 1)
    values = torch.cat([512 * large, -512 * large, small / 64], dim=1).to(dtype)
    own, rest = torch.randn(outputs, inputs - third, generator=generator).split([third, inputs - 2 * third], 1)
    weight = torch.cat([own, own, rest], dim=1).to(dtype)
    order = torch.randperm(inputs, generator=generator)
    values, weight = values[:, order].contiguous(), weight[:, order].contiguous()
    products = F.linear(values, weight)
    return all(
        torch.equal(F.linear(block, weight), expected)
        for count in counts
        for block, expected in list(zip(values.split(count), products.split(count), strict=True))[:_BLOCKS]
        if len(block) == count
    )
