"""Sources of encoder-decoder targets (T5, BART): the texts that a batch's decoder reads through cross-attention.

Legend: B batch, E source tokens, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

SOURCE_MULTIPLE = 64  # sources are padded to a multiple of this many tokens, so that few shapes occur


@dataclass(frozen=True)
class Source:
    """The encoded source texts of a batch.

    Attributes:
        token_ids: [B, E] long, as given, for drafters that have an encoder of their own.
        mask: [B, E] bool, true on real tokens; padding may be on either side.
        states: [B, E, D], the encoder's last hidden states.
    """

    token_ids: Tensor
    mask: Tensor
    states: Tensor


class SourceMemory:
    """The sources of one cache's rows, as the decoder reads them (`KVCache.source`).

    Attributes:
        states: [B, E, D], E a multiple of `SOURCE_MULTIPLE`.
        mask: [B, 1, 1, E] additive, in the dtype of the states.
        cross: keys and values of the cross-attention. The first pass writes them, later passes read them.
    """

    def __init__(self, source: Source) -> None:
        padding = -source.states.shape[1] % SOURCE_MULTIPLE
        self.states = nn.functional.pad(source.states, (0, 0, 0, padding))
        real = nn.functional.pad(source.mask, (0, padding))
        mask = torch.zeros(real.shape, dtype=self.states.dtype, device=self.states.device)
        self.mask = mask.masked_fill_(~real, torch.finfo(mask.dtype).min)[:, None, None]
        self.cross = DynamicCache()
        self._is_open = False

    def leave_open(self) -> None:
        """Tells torch.compile, after the first pass, that the number of source tokens will change."""
        if self._is_open or torch.compiler.is_compiling():
            return
        self._is_open = True
        torch._dynamo.maybe_mark_dynamic(self.states, 1)
        torch._dynamo.maybe_mark_dynamic(self.mask, 3)
        layers: Sequence[Any] = self.cross.layers
        for layer in layers:
            torch._dynamo.maybe_mark_dynamic(layer.keys, 2)
            torch._dynamo.maybe_mark_dynamic(layer.values, 2)

    def select_rows(self, rows: Tensor) -> None:
        """Keeps the rows [B'] long, in this order."""
        self.states, self.mask = self.states.index_select(0, rows), self.mask.index_select(0, rows)
        layers: Sequence[Any] = self.cross.layers
        for layer in layers:
            if layer.keys is not None:  # each on its layer's device
                layer.batch_select_indices(rows.to(layer.keys.device))
        self._is_open = False  # the tensors are new
