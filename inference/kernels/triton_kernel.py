"""Verification attention in two Triton kernels, under packed masks (`packed_masks.py`).

A query's numbers do not depend on the rest of the pass: not on other rows or nodes, nor on where its ancestors stand.
Every tile is TILE consecutive POSITIONS, and what computes it follows from the query's position alone:

- The tiles before `tail_start(position)` hold committed tokens. `_attend_tiles` reads each once for all the query heads
  of a group and all nodes. It sums splits of SPLIT slots, one after the other, or each in a program of its own.
- The last two tiles, where the tree may be, are computed by `_finish` for each node by itself. A slot of the tile is
  looked up by its position: that of a committed token, or of the node's ancestor at this depth. It first adds the
  splits in their order.

A path of more than TILE nodes crosses the rule: the result is right, but can be rounded differently.

Legend: B batch, H query heads, G key-value heads, N queries, d size of a key, v of a value, S slots in view, P parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from draftsmith.inference.kernels import packed_masks

TILE = 64
SPLIT = 512  # slots; a multiple of TILE
ROWS = 64  # queries of a group that read a tile together
FEW_ROWS = 1024  # with more queries in a group, these fill the device, and one program adds all splits
# A multiplication and an addition that become one instruction in one kernel only would be rounded differently.
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
LOG2_E = 1.4426950408889634

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_ORIGIN, _BEGIN = tl.constexpr(packed_masks.ORIGIN), tl.constexpr(packed_masks.BEGIN)
_COMMITTED, _FIRST = tl.constexpr(packed_masks.COMMITTED), tl.constexpr(packed_masks.FIRST)
_AFTER, _WORDS = tl.constexpr(packed_masks.AFTER), tl.constexpr(packed_masks.WORDS)
_WORD_BITS = tl.constexpr(packed_masks.WORD_BITS)


@triton.jit
def _find_tail(committed, after, TILE: tl.constexpr):
    """The first position of the tile before the one that holds the query."""
    before = tl.minimum((after - 1) // TILE - 1, committed // TILE)
    return tl.maximum(before, 0) * TILE


@triton.jit
def _attend_tile(top, total, acc, query, keys, values, seen, scale, FACTOR: tl.constexpr):
    """Adds a tile to the largest score, the sum of weights and the weighted sum of values of every query."""
    scores = tl.dot(query.to(FACTOR), tl.trans(keys.to(FACTOR)), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    acc = tl.dot(weights.to(FACTOR), values.to(FACTOR), acc * fade[:, None], input_precision="ieee")
    return new_top, total * fade + tl.sum(weights, 1), acc


@triton.jit
def _merge(top, total, acc, other_top, other_total, other_acc):
    """The sums over two ranges of slots. An empty one (top -inf, sums 0) changes no bit of the other."""
    new_top = tl.maximum(top, other_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade, gain = tl.exp2(top - base), tl.exp2(other_top - base)
    return new_top, total * fade + other_total * gain, acc * fade[:, None] + other_acc * gain[:, None]


@triton.jit
def _attend_tiles(
    query, key, value, mask, tops, totals, sums, scale, num_tokens, num_groups, num_slots, size, value_size,
    per_program, query_b, query_h, query_n, key_b, key_g, key_s, value_b, value_g, value_s, mask_b, mask_n,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    FACTOR: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    batch, group = (tl.program_id(2) // num_groups).to(tl.int64), tl.program_id(2) % num_groups
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    nodes, heads = rows // GROUP, group * GROUP + rows % GROUP
    is_row = nodes < num_tokens
    columns, values_at = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    mask += batch * mask_b
    begin = tl.load(mask + nodes * mask_n + _BEGIN, mask=is_row, other=1 << 60)
    committed = tl.load(mask + nodes * mask_n + _COMMITTED, mask=is_row, other=0)
    tail = _find_tail(committed, tl.load(mask + nodes * mask_n + _AFTER, mask=is_row, other=0), TILE)
    origin = tl.load(mask + _ORIGIN)
    low, high = tl.min(begin, 0) // TILE * TILE, tl.max(tail, 0)
    key += batch * key_b + group * key_g
    value += batch * value_b + group * value_g
    queries = query + batch * query_b + heads[:, None] * query_h + nodes[:, None] * query_n + columns[None, :]
    q = tl.load(queries, mask=is_row[:, None] & (columns < size)[None, :], other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    first_split = origin // SPLIT + tl.program_id(1) * per_program
    last_split = tl.minimum(first_split + per_program, (high + SPLIT - 1) // SPLIT)
    for split in range(tl.maximum(first_split, low // SPLIT), last_split):
        split_top = tl.full([ROWS], float("-inf"), tl.float32)
        split_total = tl.zeros([ROWS], tl.float32)
        split_acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
        for start in range(tl.maximum(low, split * SPLIT), tl.minimum(high, (split + 1) * SPLIT), TILE):
            slots = start + tl.arange(0, TILE)
            here = slots - origin
            is_slot = ((here >= 0) & (here < num_slots))[:, None]
            k = tl.load(
                key + here[:, None] * key_s + columns[None, :], mask=is_slot & (columns < size)[None, :], other=0.0
            )
            v = tl.load(
                value + here[:, None] * value_s + values_at[None, :],
                mask=is_slot & (values_at < value_size)[None, :],
                other=0.0,
            )
            seen = (slots[None, :] >= begin[:, None]) & (slots[None, :] < tail[:, None]) & (here >= 0)[None, :]
            split_top, split_total, split_acc = _attend_tile(
                split_top, split_total, split_acc, q, k, v, seen, scale, FACTOR
            )
        top, total, acc = _merge(top, total, acc, split_top, split_total, split_acc)

    num_batches = tl.num_programs(2) // num_groups
    places = (tl.program_id(1) * num_batches + batch) * num_groups * GROUP * num_tokens + heads * num_tokens + nodes
    tl.store(tops + places, top, mask=is_row)
    tl.store(totals + places, total, mask=is_row)
    at = sums + places[:, None] * value_size + values_at[None, :]
    tl.store(at, acc, mask=is_row[:, None] & (values_at < value_size)[None, :])


@triton.jit
def _find_slots(slots, mask, committed, first, num_words, WORD_BITS: tl.constexpr):
    """Where the tokens at these positions are: in their own slots, or, from `committed` on, in those of ancestors."""
    places = tl.arange(0, WORD_BITS)
    node = tl.zeros_like(slots)
    passed = committed
    for word in range(num_words):
        bits = (tl.load(mask + _WORDS + word) >> places) & 1
        positions = passed + tl.sum(tl.where(places[None, :] < places[:, None], bits[None, :], 0), 1)
        is_it = (bits[None, :] == 1) & (positions[None, :] == slots[:, None])
        node += tl.sum(tl.where(is_it, word * WORD_BITS + places[None, :], 0), 1)
        passed += tl.sum(bits, 0)
    return tl.where(slots < committed, slots, first + node)


@triton.jit
def _finish(
    query, key, value, mask, tops, totals, sums, out, scale, num_parts, num_words, num_slots, size, value_size,
    query_b, query_h, query_n, key_b, key_g, key_s, value_b, value_g, value_s, mask_b, mask_n,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    FACTOR: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    node, group, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_tokens, num_heads, num_batches = tl.num_programs(0), tl.num_programs(1) * GROUP, tl.num_programs(2)
    members = tl.arange(0, HEADS)
    heads, is_head = group * GROUP + members, members < GROUP
    columns, values_at = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    key += batch * key_b + group * key_g
    value += batch * value_b + group * value_g
    mask += batch * mask_b + node * mask_n
    origin, begin, committed = tl.load(mask + _ORIGIN), tl.load(mask + _BEGIN), tl.load(mask + _COMMITTED)
    first, after = tl.load(mask + _FIRST), tl.load(mask + _AFTER)
    queries = query + batch * query_b + heads[:, None] * query_h + node * query_n + columns[None, :]
    q = tl.load(queries, mask=is_head[:, None] & (columns < size)[None, :], other=0.0)

    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, VALUE_WIDTH], tl.float32)
    is_value = is_head[:, None] & (values_at < value_size)[None, :]
    for part in range(num_parts):
        places = ((part * num_batches + batch) * num_heads + heads) * num_tokens + node
        part_top = tl.load(tops + places, mask=is_head, other=float("-inf"))
        part_total = tl.load(totals + places, mask=is_head, other=0.0)
        part_acc = tl.load(sums + places[:, None] * value_size + values_at[None, :], mask=is_value, other=0.0)
        top, total, acc = _merge(top, total, acc, part_top, part_total, part_acc)

    for start in range(_find_tail(committed, after, TILE), after, TILE):
        slots = start + tl.arange(0, TILE)
        here = _find_slots(slots, mask, committed, first, num_words, _WORD_BITS) - origin
        is_seen = (slots >= begin) & (slots < after) & (here >= 0) & (here < num_slots)
        k = tl.load(
            key + here[:, None] * key_s + columns[None, :],
            mask=is_seen[:, None] & (columns < size)[None, :],
            other=0.0,
        )
        v = tl.load(
            value + here[:, None] * value_s + values_at[None, :],
            mask=is_seen[:, None] & (values_at < value_size)[None, :],
            other=0.0,
        )
        top, total, acc = _attend_tile(top, total, acc, q, k, v, is_seen[None, :], scale, FACTOR)

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    places = (batch * num_tokens + node) * num_heads + heads
    tl.store(out + places[:, None] * value_size + values_at[None, :], result.to(out.dtype.element_ty), mask=is_value)


@torch.library.custom_op("draftsmith::attend_packed", mutates_args=())
def attend_packed(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, scale: float) -> Tensor:
    """Attention under a packed mask.

    Args:
        query: [B, H, N, d].
        key, value: [B, G, S, d] and [B, G, S, v], of the query's dtype: float32, bfloat16 or float16. Sums and the
            softmax are in float32.
        packed: [1 or B, 1, N, 5 + words] long.
        scale: factor of the scores.

    Returns:
        [B, N, H, v]; zeros for a query that sees nothing.
    """
    query, key, value, packed = (
        rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (query, key, value, packed)
    )
    batch, num_heads, num_tokens, size = query.shape
    num_groups, num_slots, value_size = value.shape[1:]
    group, num_words = num_heads // num_groups, packed.shape[-1] - packed_masks.WORDS
    mask_strides = (packed.stride(0) if packed.shape[0] > 1 else 0, packed.stride(2))
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *mask_strides)
    # The view may begin and end inside a split.
    num_splits = -(-num_slots // SPLIT) + 1
    per_program = num_splits if group * num_tokens > FEW_ROWS else 1
    num_parts = -(-num_splits // per_program)
    sums = query.new_empty((num_parts, batch, num_heads, num_tokens, value_size), dtype=torch.float32)
    tops, totals = (sums.new_empty(sums.shape[:-1]) for _ in range(2))
    # Triton's interpreter multiplies the bits of bfloat16 numbers, and cuts numbers off instead of rounding them.
    is_interpreted = triton.knobs.runtime.interpret
    factor = tl.float32 if is_interpreted else DTYPES[query.dtype]
    out = (sums if is_interpreted else query).new_empty((batch, num_tokens, num_heads, value_size))
    widths = {"WIDTH": _pad_width(size), "VALUE_WIDTH": _pad_width(value_size)}
    widths |= {"GROUP": group, "TILE": TILE, "FACTOR": factor}
    with as_runtime_errors("attention"), torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        _attend_tiles[(triton.cdiv(group * num_tokens, ROWS), num_parts, batch * num_groups)](
            query, key, value, packed, tops, totals, sums, scale * LOG2_E, num_tokens, num_groups, num_slots, size,
            value_size, per_program, *strides, **widths, SPLIT=SPLIT, ROWS=ROWS, **OPTIONS,
        )  # fmt: skip
        _finish[(num_tokens, num_groups, batch)](
            query, key, value, packed, tops, totals, sums, out, scale * LOG2_E, num_parts, num_words, num_slots, size,
            value_size, *strides, **widths, HEADS=max(16, triton.next_power_of_2(group)), **OPTIONS,
        )  # fmt: skip
    return out.to(query.dtype)


@attend_packed.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, scale: float) -> Tensor:
    batch, num_heads, num_tokens, _ = query.shape
    return query.new_empty((batch, num_tokens, num_heads, value.shape[-1]))


@contextmanager
def as_runtime_errors(name: str) -> Iterator[None]:
    """Triton's errors, among them too little memory in a multiprocessor, as errors that `Target` falls back after."""
    try:
        yield
    except TritonError as error:
        raise RuntimeError(f"{name} in Triton failed: {error}") from error


def _pad_width(size: int) -> int:
    padded: int = triton.next_power_of_2(size)
    return max(16, padded)
