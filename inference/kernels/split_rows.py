"""Products whose rows do not depend on their number, where this machine's kernels add a row's numbers in another order
when there are more rows: AMX's from 33 rows on, MKL's for float32 from about 9 rows on, cuBLAS's at many numbers.

On a CPU a product gets a few rows at a time; on CUDA it is a Triton kernel (`triton_linear.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.inference.kernels.attention import can_use_kernel
from draftsmith.inference.kernels.packed_weights import PackedLinear, PackedMatrix, make_twin, split_evenly

# Sizes of a tile, largest first, None = any number of rows; with the numbers of rows that are compared. Passes have
# four rows at least.
_TILES: dict[int | None, Sequence[int]] = {
    None: (4, 5, 8, 9, 12, 16, 17, 32, 33, 64, 129),
    32: (4, 5, 8, 9, 12, 15, 16, 17, 24, 31, 32),
    8: (4, 5, 6, 7, 8),
}
_SHAPES = ((256, 256), (704, 256), (576, 1536), (1536, 576), (1024, 1024))  # inputs and outputs
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


def fix_rows(module: M, dtype: torch.dtype, device: torch.device) -> M | None:
    """A twin of `module` in which no row of a product depends on their number; None = the module's own are like this,
    or nothing here can replace them."""
    if can_use_kernel(device):
        from draftsmith.inference.kernels import triton_linear

        return triton_linear.use_triton(module)
    tile = find_tile(dtype, device.type)
    return None if tile is None else split_rows(module, tile)


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


@cache
def find_tile(dtype: torch.dtype, device: str) -> int | None:
    """How many rows at most a product on this type of device may have, so that no row depends on their number; None =
    any number."""
    if device != "cpu":
        return None
    return next((tile for tile, counts in _TILES.items() if _is_one_kernel(dtype, counts)), min(filter(None, _TILES)))


def _is_one_kernel(dtype: torch.dtype, counts: Sequence[int]) -> bool:
    """Sums of numbers that cancel each other show another order."""
    generator = torch.Generator().manual_seed(0)
    large = 2.0**15 if dtype == torch.float16 else 2.0**40
    for inputs, outputs in _SHAPES:
        weight = torch.ones(outputs, inputs, dtype=dtype)
        rows = torch.randn(max(counts), inputs, generator=generator)
        rows[:, torch.randperm(inputs, generator=generator)[:2]] = torch.tensor([large, -large])
        rows = rows.to(dtype)
        first, *others = (F.linear(rows[:count], weight)[: counts[0]] for count in counts)
        if not all(torch.equal(one, first) for one in others):
            return False
    return True
