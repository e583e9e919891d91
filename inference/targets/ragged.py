"""RaggedRows: trees of different sizes, read as one row of tokens.

Layers work on each token by itself, but for attention, which pads the rows again (`kernels/attention.py`), and the
cache, which knows every token's row and slot (`KVCache.pack`). So a pass costs what its real nodes cost.

Legend: B batch, N nodes of the largest tree, T nodes of all trees.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.kernels.attention import RAGGED


class RaggedRows:
    """Where the nodes of B trees, of which the first widths[b] are real, stand among B x N. On a CPU only.

    Worked example, trees of 1, 3 and 2 nodes:

        padded   0 . .   3 4 5   6 7 .
        places   0 3 4 5 6 7

    Attributes:
        places: [T] long.
    """

    def __init__(self, widths: Sequence[int], num_nodes: int) -> None:
        is_real = torch.arange(num_nodes, device="cpu") < torch.tensor(widths, device="cpu")[:, None]
        self._shape, self.places = is_real.shape, is_real.flatten().nonzero()[:, 0]

    def pack(self, values: Tensor) -> Tensor:
        """Values [..., 1, T] of values [..., B, N]."""
        return values.flatten(-2).index_select(-1, self.places)[..., None, :]

    def unpack(self, values: Tensor) -> Tensor:
        """Values [B, N, ...] of values [1, T, ...]. Between rows stands anything, which nobody may read."""
        padded = values.new_empty(*self._shape, *values.shape[2:])
        padded.flatten(0, 1).index_copy_(0, self.places, values[0])
        return padded

    def mark(self, masks: Any) -> None:
        """Masks over B x N nodes tell attention that its queries are packed."""
        every: list[Any] = [*masks.values()] if isinstance(masks, Mapping) else [masks]
        for mask in every:
            if mask is not None:
                vars(mask)[RAGGED] = self.places
