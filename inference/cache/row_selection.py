"""Some rows of a batch, in a new order: moved within a tensor, or copied from it.

Legend: B batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def first_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Moves row rows[i] >= i of `values` [B, ...] to row i, in place, and returns a view of these rows."""
    for place, row in enumerate(rows):
        assert row >= place, "an earlier row would have been overwritten"
        if row > place:
            values[place] = values[row]
    return values[: len(rows)]


def pick_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of `values` [B, ...] in this order, copied. An index made of the numbers would be a blocking copy from the
    host to the device."""
    return torch.cat([values[row : row + 1] for row in rows])
