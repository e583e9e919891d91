"""One block of multi-token prediction (`draftsmith.heads.kinds.mtp`): a projection that joins state and embedding, and
a layer.

Legend: B batch, Q rows of a pass, T sequence length, S cache columns in view, D hidden size, G key/value heads, d head
size.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from draftsmith.heads.modules.layers import DecoderLayer, DraftAttention, DraftCache, RMSNorm, Rows
from draftsmith.heads.modules.stock_layer import StockLayer


class MTPLayer(DecoderLayer):
    """A decoder layer like Llama's."""

    def __init__(self, config: PreTrainedConfig, window: int | None) -> None:
        size = config.hidden_size
        super().__init__(config, size, DraftAttention(config, size, size, window=window))

    def new_cache(self, batch_size: int, **sizes: int) -> DraftCache:
        return self.self_attn.new_cache(batch_size, **sizes)

    def decode(self, x: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """x [B, Q, D] at positions [B, Q] -> [B, Q, D]."""
        q, keys, values = self.project(x, positions)
        return self.finish(x, self.self_attn.attend(q, *rows.update(keys, values), rows.mask))

    def unroll(self, x: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Whole sequences x [B, T, D] -> [B, T, D]. A slot sees depth 0 of earlier slots, and all depths of its own.

        Args:
            past: keys and values of the depths before this one; this depth's are appended.
        """
        q, keys, values = self.project(x, positions)
        past.append((keys, values))
        return self.finish(x, self.self_attn.attend_unrolled(q, [k for k, _ in past], [v for _, v in past]))


class MTPBlock(nn.Module):
    """An MTP block. Tensor names are those of DeepSeek-V3's checkpoints, with `norm` for `shared_head.norm`."""

    def __init__(self, config: PreTrainedConfig, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer: MTPLayer | StockLayer = (
            MTPLayer(config, config.window(index))
            if config.stock_layer is None
            else StockLayer(config.stock_layer, index)
        )
        self.norm = RMSNorm(size, eps)
        self.is_hidden_first: bool = config.hidden_first
        self.norms_output: bool = config.norm_output

    def join(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The decoder layer's input: states and embeddings [B, Q, D] -> [B, Q, D]."""
        inputs = [self.enorm(embedded), self.hnorm(state)]
        return cast(Tensor, self.eh_proj(torch.cat(inputs[::-1] if self.is_hidden_first else inputs, dim=-1)))

    def next_state(self, hidden: Tensor) -> Tensor:
        """The layer's output in the form that the next depth reads."""
        return cast(Tensor, self.norm(hidden)) if self.norms_output else hidden

    def scored(self, state: Tensor) -> Tensor:
        """`next_state` in the form that the LM head reads."""
        return state if self.norms_output else cast(Tensor, self.norm(state))
