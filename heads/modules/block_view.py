"""The attention of drafted blocks in training: each over the context up to its own slot and over itself.

Legend: B batch, T context length, A blocks of N rows, H query heads, G key/value heads, d head size.
"""

from collections.abc import Callable
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from draftsmith.heads.modules.host_tensors import send
from draftsmith.heads.modules.unrolled_attention import QUERY_CHUNK
from draftsmith.inference.kernels.attention import attend_masked


class BlockView:
    """What the rows of A blocks see; made once for all layers.

    Args:
        slots: [B, A] int64 on the host, each block's last position of the context.
        mask: [N, N] bool, which rows of its block a row sees.
        length: T.
        window: how many positions of the context, up to the slot, a row sees; None = all.
        ahead: [N] int64, how far the window of each row is ahead of the slot's; None = not at all.
    """

    def __init__(
        self, slots: Tensor, mask: Tensor, length: int, window: int | None = None, ahead: Tensor | None = None
    ) -> None:
        self.slots = slots
        self.mask = mask
        self.length = length
        self.window = window if window is not None and window < length + len(mask) else None
        self.ahead = torch.zeros(len(mask), dtype=torch.long, device=mask.device) if ahead is None else ahead

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        """q [B, H, A * N, d], k and v [B, G, A * N, d] of the blocks, keys and values [B, G, T, d] of the context ->
        [B, H, A * N, d].

        CPUs, where flex attention has no backward pass, run a few blocks at a time: all queries of one call read the
        keys of all its blocks, and the context up to its last slot. So blocks in the order of their slots take half
        the time.
        """
        if q.device.type == "cuda":
            return self._attend_in_one_call(q, k, v, context)
        size = self.mask.shape[0]
        step = max(1, QUERY_CHUNK // size)
        attended = []
        for start in range(0, self.slots.shape[1], step):
            few = self.slots[:, start : start + step]
            own = slice(start * size, (start + few.shape[1]) * size)
            # On the host: the positions of the context that some block sees.
            seen = range(0 if self.window is None else max(0, int(few.min()) + 1 - self.window), int(few.max()) + 1)
            pairs = zip(context, (k, v), strict=True)
            keys, values = (torch.cat([x[:, :, seen.start : seen.stop], y[:, :, own]], dim=2) for x, y in pairs)
            attended.append(attend_masked(q[:, :, own], keys, values, self._mask_of(few, seen)))
        return torch.cat(attended, dim=2)

    def _mask_of(self, slots: Tensor, seen: range) -> Tensor:
        """[B, 1, a * N, len(seen) + a * N] bool of a few blocks over these positions of the context."""
        size, count, device = self.mask.shape[0], slots.shape[1], self.mask.device
        columns = torch.arange(seen.start, seen.stop, device=device)
        ends = send(slots, device).repeat_interleave(size, dim=1)[..., None]
        sees_context = columns <= ends
        if self.window is not None:
            sees_context = sees_context & (columns > ends - self.window + self.ahead.repeat(count)[:, None])
        own = torch.eye(count, dtype=torch.bool, device=device).repeat_interleave(size, 0)
        own = own.repeat_interleave(size, 1) & self.mask.repeat(count, count)
        return torch.cat([sees_context, own.expand(len(slots), -1, -1)], dim=-1)[:, None]

    def _attend_in_one_call(self, q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, (k, v), strict=True))
        attend, _ = _compiled()
        is_grouped = q.shape[1] != k.shape[1]
        return attend(q, keys, values, block_mask=self._block_mask, enable_gqa=is_grouped)

    @cached_property
    def _block_mask(self) -> BlockMask:
        """The rule of `_mask_of` for all blocks, from which flex attention skips what nothing sees."""
        mask, length, size, window, ahead = self.mask, self.length, self.mask.shape[0], self.window, self.ahead
        slots = send(self.slots, mask.device)
        batch, rows = slots.shape[0], slots.shape[1] * size

        def sees(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            other = (column - length).clamp(min=0)  # a row of a block, unless the column belongs to the context
            is_own = (row // size == other // size) & mask[row % size, other % size]
            end = slots[b, row // size]
            is_seen = column <= end
            if window is not None:
                is_seen = is_seen & (column > end - window + ahead[row % size])
            return torch.where(column < length, is_seen, is_own)

        _, make = _compiled()
        return make(sees, batch, None, rows, length + rows, device=str(slots.device))


@cache
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., BlockMask]]:
    """Without compiling, both would fill whole matrices of rows and columns."""
    compiled: tuple[Callable[..., Tensor], Callable[..., BlockMask]] = (
        torch.compile(flex_attention, dynamic=True),
        torch.compile(create_block_mask, dynamic=True),
    )
    return compiled
