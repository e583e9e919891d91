"""Convolutions along a drafted block, around the sublayers of a draft layer (DFlash 2, Inco AI and z-lab 2026).

Legend: B batch, Q rows of a pass (whole blocks of N), N block size, D hidden size, J taps, G groups of channels that
share a correction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from draftsmith.heads.modules.block_layer import BlockAttention, BlockLayer


class BlockConvolution(nn.Module):
    """Two depthwise convolutions, of a sublayer's input and of its output:

        y_t = sum over j < J of (base_j + correction_j(x_t)) x_{t-j}, without rows before the block,

    where x is the sublayer's input. Both corrections are linear in it. Starts as the identity.
    """

    def __init__(self, hidden_size: int, block_size: int, num_taps: int, group_size: int) -> None:
        super().__init__()
        self.block_size, self.group_size = block_size, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, num_taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * num_taps * (hidden_size // group_size), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B, Q, D] -> the sublayer's output [B, Q, D], between the convolutions."""
        _, num_taps, _ = self.base_kernel.shape
        corrections = self.kernel_projection(x).unflatten(-1, (2, num_taps, -1))
        y = sublayer(self._convolve(x, 0, corrections[..., 0, :, :]))
        return self._convolve(y, 1, corrections[..., 1, :, :])

    def _convolve(self, x: Tensor, side: int, corrections: Tensor) -> Tensor:
        """x [B, Q, D]; corrections [B, Q, J, G].

        Worked example: N = 2, base taps 1 and 10, no corrections: rows 1, 2, 3, 4 become 1, 12, 3, 34.
        """
        blocks = x.unflatten(1, (-1, self.block_size))
        total = torch.zeros_like(x)
        for tap, base in enumerate(self.base_kernel[side].to(x.dtype)):
            shifted = F.pad(blocks, (0, 0, tap, 0))[:, :, : self.block_size].flatten(1, 2)
            total = total + (base + corrections[:, :, tap].repeat_interleave(self.group_size, dim=-1)) * shifted
        return total


class ConvolvedLayer(BlockLayer):
    """A block drafter's layer with convolutions around its attention and its MLP. Keys and values of the fused features
    are not convolved.

    `config` has `block_size`, `conv_kernel_size` (J) and `conv_group_size` (D / G).
    """

    def __init__(self, config: PreTrainedConfig, window: int | None = None) -> None:
        super().__init__(config, window)
        shape = config.hidden_size, config.block_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv = BlockConvolution(*shape)
        self.mlp_conv = BlockConvolution(*shape)

    def run(self, hidden: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        attention = partial(_attend, self.self_attn, positions, attend)
        return self.finish(hidden, self.attention_conv(self.input_layernorm(hidden), attention))

    def _add_mlp(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp))


def _attend(
    attention: BlockAttention, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor
) -> Tensor:
    return attend(*attention.project(x, positions))
