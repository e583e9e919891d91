"""Linear layers in a Triton kernel whose order of additions does not depend on the number of rows, for
`Target.batch_invariant`: the libraries of GPUs choose another kernel for another number of rows.

One program computes COLUMNS outputs of a tile of rows. It adds the products of all inputs, from the first to the last.
A tile has the same size for every number of rows; missing rows are zeros. A product of at most a tile of rows reads the
weights once.

Legend: R rows, I inputs, O outputs.
"""

from contextlib import nullcontext
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.inference.kernels.packed_weights import make_twin
from draftsmith.inference.kernels.triton_kernel import DTYPES, as_runtime_errors

# Rows and inputs of a tile. In float32 the matrix units are not used, so that every further row takes time.
TILES = {torch.float32: (16, 64), torch.bfloat16: (64, 128), torch.float16: (64, 128)}
COLUMNS = 32  # so few that 4,096 outputs are 128 programs, about as many as a large GPU has multiprocessors
OPTIONS = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": False}
M = TypeVar("M", bound=nn.Module)


# Triton would make a kernel of its own for one row, and another one for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    rows, weight, bias, out, num_rows, num_inputs, num_outputs,
    HAS_BIAS: tl.constexpr, FACTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    first_row, first_column = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64) * COLUMNS
    row, column, inputs = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, INPUTS)
    is_row, is_column = row < num_rows - first_row, column < num_outputs - first_column
    row_at = rows + first_row * num_inputs + row[:, None] * num_inputs + inputs[None, :]
    weight_at = weight + first_column * num_inputs + column[None, :] * num_inputs + inputs[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        is_input = inputs < num_inputs - start
        x = tl.load(row_at + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
        w = tl.load(weight_at + start, mask=is_input[:, None] & is_column[None, :], other=0.0)
        acc = tl.dot(x.to(FACTOR), w.to(FACTOR), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + first_column + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out + first_row * num_outputs + first_column + row[:, None] * num_outputs + column[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@torch.library.custom_op("draftsmith::multiply_rows", mutates_args=())
def multiply_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, added up in float32.

    Args:
        rows: [R, I] float32, bfloat16 or float16, contiguous.
        weight: [O, I] of the same dtype, contiguous.
        bias: [O] of the same dtype, contiguous.

    Returns:
        [R, O] of this dtype.
    """
    (num_rows, num_inputs), num_outputs = rows.shape, len(weight)
    tile_rows, tile_inputs = TILES[rows.dtype]
    # As in attention: Triton's interpreter takes bfloat16 numbers for their bits.
    is_interpreted = triton.knobs.runtime.interpret
    factor = tl.float32 if is_interpreted else DTYPES[rows.dtype]
    out = rows.new_empty((num_rows, num_outputs), dtype=torch.float32 if is_interpreted else rows.dtype)
    with as_runtime_errors("a product"), torch.cuda.device(rows.device) if rows.is_cuda else nullcontext():
        # Programs of the same weights follow each other.
        _multiply[(triton.cdiv(num_rows, tile_rows), triton.cdiv(num_outputs, COLUMNS))](
            rows, weight, bias, out, num_rows, num_inputs, num_outputs, HAS_BIAS=bias is not None, FACTOR=factor,
            ROWS=tile_rows, COLUMNS=COLUMNS, INPUTS=tile_inputs, **OPTIONS,
        )  # fmt: skip
    return out.to(rows.dtype)


@multiply_rows.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty((len(rows), len(weight)))


class TritonLinear(nn.Linear):
    """A linear layer whose products are `multiply_rows`, except where gradients are computed, or by autocast."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """input [..., in_features] -> [..., out_features]."""
        if input.requires_grad or input.dtype != self.weight.dtype:
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        product: Tensor = multiply_rows(rows, self.weight, self.bias)
        return product.view(*input.shape[:-1], len(self.weight))


def use_triton(module: M) -> M:
    """A twin of `module` whose plain linear layers are `TritonLinear`s. Others, such as quantised ones, stay."""
    return make_twin(module, lambda part: TritonLinear if _is_plain(part) else type(part))


def _is_plain(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module) or type(module.weight) is not nn.Parameter:
        return False
    return module.weight.dtype in TILES and module.weight.is_contiguous()
