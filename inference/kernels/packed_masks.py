"""Packed masks: the slots that each query of a pass sees, as two ranges of slots and a bit per node of the tree.

A packed mask [B, 1, N, 5 + words] is a 4-D tensor, which transformers hands to the layers unchanged; its dtype, long,
tells it from additive masks. Its size does not depend on the number of slots.

Legend: B batch, N queries, M slots of the tree, S slots in view.
"""

import torch
from torch import Tensor

# The columns of a packed mask. Slots are numbered from the row's first token on, whatever the view.
ORIGIN = 0  # the view's first slot
BEGIN = 1  # the first slot that the query sees: its window
COMMITTED = 2  # the end of the committed slots that it sees
FIRST = 3  # the slot of the tree's node 0
AFTER = 4  # one more than the query's position: COMMITTED and the number of its ancestors
WORDS = 5  # from here on its ancestors: bit j of word w is node 64 * w + j
WORD_BITS = 64


PACKED = torch.long  # the dtype that tells packed masks from additive ones


def pack_tree(ancestors: Tensor, committed: Tensor, first: Tensor, *, origin: Tensor, window: int | None) -> Tensor:
    """The packed mask of a tree's nodes.

    Every node sees the committed tokens and its ancestors, which are a whole path: the r-th of them, counted from 0,
    stands at position `committed` + r.

    Worked example, 5 committed tokens, the root and its two children in slots 5 to 7, no window:

        origin, begin, committed, first, after, words
             0      0          5      5      6  0b001
             0      0          5      5      7  0b011
             0      0          5      5      7  0b101

    Args:
        ancestors: [B, N, M] bool, itself included.
        committed, first: [B, 1] long, the row's committed tokens and the slot of the tree's node 0.
        origin: [1] long, the view's first slot.
        window: a query at position p sees positions > p - window; None = all.

    Returns:
        [B, 1, N, 5 + words] long.
    """
    bits = torch.nn.functional.pad(ancestors, (0, -ancestors.shape[-1] % WORD_BITS)).unflatten(-1, (-1, WORD_BITS))
    words = (bits.long() << torch.arange(WORD_BITS, device=bits.device)).sum(-1)
    return _join(committed, first, committed + ancestors.sum(-1), words, origin, window)


def pack_chain(lengths: Tensor, num_tokens: int, *, origin: Tensor, window: int | None) -> Tensor:
    """The packed mask of tokens after `lengths` [B, 1] long committed ones, each of which sees all before it.

    It has no words, since a token's slot is its position.
    """
    after = lengths + torch.arange(1, num_tokens + 1, device=lengths.device)
    return _join(after, lengths, after, after.new_empty(*after.shape, 0), origin, window)


def _join(committed: Tensor, first: Tensor, after: Tensor, words: Tensor, origin: Tensor, window: int | None) -> Tensor:
    begin = torch.zeros_like(after) if window is None else (after - window).clamp(min=0)
    columns = [origin.expand_as(after), begin, committed.expand_as(after), first.expand_as(after), after]
    return torch.cat([torch.stack(columns, dim=-1), words], dim=-1)[:, None]


def unpack_mask(packed: Tensor, num_slots: int, dtype: torch.dtype) -> Tensor:
    """The additive mask [B, 1, N, S] that a packed mask stands for: 0 or the dtype's minimum."""
    columns, words = packed[:, 0, :, :WORDS, None], packed[:, 0, :, WORDS:, None]
    origin, begin, committed, first, _ = columns.unbind(2)  # each [B, N, 1]
    slots = origin + torch.arange(num_slots, device=packed.device)  # [B, N, S]
    seen = (slots >= begin) & (slots < committed)
    if words.shape[2]:
        bits = ((words >> torch.arange(WORD_BITS, device=packed.device)) & 1).flatten(2)  # [B, N, 64 * words]
        in_window = committed + bits.cumsum(-1) - 1 >= begin
        nodes = slots - first
        is_node = (nodes >= 0) & (nodes < bits.shape[-1])
        own = (bits.bool() & in_window).gather(-1, nodes.clamp(0, bits.shape[-1] - 1))
        seen = torch.where(is_node, own, seen)
    shut = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=packed.device)
    return torch.where(seen, torch.zeros_like(shut), shut)[:, None]


def unpack_even_chain(packed: Tensor, num_slots: int, dtype: torch.dtype) -> Tensor:
    """`unpack_mask` of `pack_chain` for rows of one length [1, 1, N, 5], with the queries in REVERSED order.

    An entry then depends only on the sum of its two indices, so all rows are views [1, 1, N, S] of N + S - 1 numbers.

    Worked example, 2 tokens after 1 token, 4 slots: the numbers are 0 0 0 - - (0 = seen); the last token sees
    0 0 0 -, the one before it 0 0 - -.
    """
    num_tokens = packed.shape[2]
    last = packed[0, 0, -1]  # the chain's last token comes first
    slots = last[ORIGIN] + torch.arange(num_tokens + num_slots - 1, device=packed.device)
    seen = (slots >= last[BEGIN]) & (slots < last[COMMITTED])
    shut = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=packed.device)
    numbers = torch.where(seen, torch.zeros_like(shut), shut)
    return numbers.as_strided((1, 1, num_tokens, num_slots), (0, 0, 1, 1))
