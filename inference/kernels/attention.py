"""Grouped attention under a 4-D mask that reads the cache's keys and values once.

For several tokens with a mask, transformers repeats keys and values for every query head of a group, which copies the
whole view of the cache in each layer. Here the query heads of a group become more query rows of their key-value head.
The arithmetic of a row is the same.

A mask in float64 asks for `attend_exactly`, in which no number depends on the other rows (`Target.batch_invariant`).

Legend: B batch, H query heads, G key-value heads, N tokens of the pass, S cache slots in view, d head size.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.inference.kernels.packed_masks import PACKED, WORDS, unpack_even_chain, unpack_mask
from draftsmith.inference.shared_swaps import SharedSwap

STOCK = "sdpa"
GROUPED = "sdpa_grouped_rows"
MAX_ROW_BYTES = 512  # of a key or value in the Triton kernels
RAGGED = "ragged_rows"  # of a mask over padded rows: the places [T] of a packed pass's tokens in them (`RaggedRows`)
REPEATED = "repeated_rows"  # of a mask that nobody changes: a dict for its rows as the heads of a group read them
MOST_COPIED = 1 << 18  # numbers that `attend_exactly` copies at once: more do not stay in a processor's caches
LONG_PASS = 128  # in passes of this many tokens, repeating the mask costs more than repeating the keys
# The ids of configs whose models run in grouped attention anyway.
_HELD: ContextVar[tuple[int, ...]] = ContextVar("held", default=())


def attend_grouped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: query [B, H, N, d], key, value [B, G, S, d].

    The mask is additive [B, 1, N, S], or packed (`packed_masks.py`).

    Returns:
        [B, N, H, d]. transformers' own function computes everything but grouped attention under such a mask.
    """
    if attention_mask is not None and not torch.compiler.is_compiling() and RAGGED in vars(attention_mask):
        return _attend_ragged(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if attention_mask is not None and attention_mask.dtype == torch.float64:
        return attend_exactly(query, key, value, attention_mask, scaling), None
    num_heads, num_groups = query.shape[1], key.shape[1]
    get = kwargs.get
    is_plain = not dropout and get("position_bias") is None and get("s_aux") is None and get("softcap") is None
    if attention_mask is not None and attention_mask.dtype == PACKED:
        if is_plain:
            return _attend_packed(query, key, value, attention_mask, scaling), None
        attention_mask = unpack_mask(attention_mask, key.shape[2], query.dtype)
    if num_heads == num_groups or attention_mask is None or attention_mask.shape[1] != 1 or not is_plain:
        stock: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return stock
    attended = attend_masked(query, key, value, attention_mask, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def _attend_ragged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """`attend_grouped` for queries [1, H, T, d] of rows of different lengths; the mask is over padded rows."""
    places, (batch, _, num_nodes, _) = vars(mask)[RAGGED], mask.shape
    padded = query.new_zeros(batch * num_nodes, query.shape[1], query.shape[3])
    padded.index_copy_(0, places, query[0].transpose(0, 1))
    padded = padded.unflatten(0, (batch, num_nodes)).transpose(1, 2)
    plain = mask.view(mask.shape)  # without what is told of this one
    if REPEATED in vars(mask):
        vars(plain)[REPEATED] = vars(mask)[REPEATED]
    attended, _ = attend_grouped(module, padded, key, value, plain, **kwargs)
    return attended.flatten(0, 1).index_select(0, places)[None], None


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, scale: float | None) -> Tensor:
    """Attention [B, N, H, d of the values] under a packed mask."""
    num_slots, size = key.shape[2:]
    if can_use_kernel(query.device) and fits_kernel(query.dtype, size, value.shape[-1]):
        from draftsmith.inference.kernels import triton_kernel

        scale = size**-0.5 if scale is None else scale
        attended: Tensor = triton_kernel.attend_packed(query, key, value, packed, scale)
        return attended
    is_even_chain = packed.shape[0] == 1 and packed.shape[-1] == WORDS
    if is_even_chain and query.device.type == "cpu":  # other devices' functions would copy a mask with such strides
        mask = unpack_even_chain(packed, num_slots, query.dtype)
        return attend_masked(query.flip(2), key, value, mask, scale=scale).flip(2).transpose(1, 2).contiguous()
    mask = unpack_mask(packed, num_slots, query.dtype)
    return attend_masked(query, key, value, mask, scale=scale).transpose(1, 2).contiguous()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def can_use_kernel(device: torch.device) -> bool:
    """Whether the Triton kernels run on this device: on CUDA, and anywhere with TRITON_INTERPRET=1 (slowly)."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or is_interpreted) and importlib.util.find_spec("triton") is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_bfloat16_alone() -> bool:
    """Whether the processor has instructions for products in bfloat16, and no AMX: then compiled products are
    oneDNN's, not inductor's own, which would compute in float32."""
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def fits_kernel(dtype: torch.dtype, *widths: int) -> bool:
    """Whether the kernels' tiles of keys and values of these widths fit into a multiprocessor."""
    is_known = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_known and max(widths) * dtype.itemsize <= MAX_ROW_BYTES


def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Attention that reads each key-value head once, except in passes of `LONG_PASS` tokens and more.

    Args:
        query: [B, H, N, d].
        key, value: [B, G, S, d]; the values may have another width.
        mask: [B, 1, N, S], bool or additive.
        scale: factor of the scores; None = d ** -0.5.

    Returns:
        [B, H, N, d of the values].
    """
    batch, num_heads, num_tokens, size = query.shape
    num_groups = key.shape[1]
    per_group = num_heads // num_groups
    if per_group > 1 and num_tokens >= LONG_PASS:
        return _attend_by_member(query, key, value, mask, scale)
    if per_group > 1:
        query = query.reshape(batch, num_groups, per_group * num_tokens, size)
        # All layers of a pass get one mask. A graph has one such operation for all of them anyway.
        kept = None if torch.compiler.is_compiling() else vars(mask).get(REPEATED)
        if kept is None:
            mask = mask.repeat(1, 1, per_group, 1)
        else:
            if per_group not in kept:
                kept[per_group] = mask.repeat(1, 1, per_group, 1)
            mask = kept[per_group]
    attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return attended.reshape(batch, num_heads, num_tokens, value.shape[-1])


def _attend_by_member(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """`attend_masked` for prompts: first the first query head of every group, then the second, and so on.

    The keys are read once for each; the mask, the largest tensor of such a pass, is not repeated."""
    members = query.unflatten(1, (key.shape[1], -1))  # [B, G, H / G, N, d]
    attended = query.new_empty(*members.shape[:-1], value.shape[-1])
    for place in range(members.shape[2]):
        attended[:, :, place] = nn.functional.scaled_dot_product_attention(
            members[:, :, place], key, value, attn_mask=mask, scale=scale
        )
    return attended.flatten(1, 2)


def attend_exactly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Attention whose result does not depend on the order of the keys, on masked slots between and after them, or on
    the other queries.

    The branches of a tree leave gaps between the slots of a path, so a path's keys are added in another order than a
    text's. In float64 the order changes the sums by 1e-16, which rounding to the model's dtype hides.

    Args:
        query, key, value, scale: as in `attend_masked`.
        mask: [B, 1, N, S] float64, additive.

    Returns:
        [B, N, H, d of the values], contiguous.
    """
    if torch.compiler.is_compiling() or key.numel() <= MOST_COPIED:
        attended = attend_masked(query.double(), key.double(), value.double(), mask, scale=scale)
    else:
        parts = (plane.tensor_split(key.shape[1], dim=1) for plane in (query, key, value))
        each = zip(*parts, strict=True)
        attended = torch.cat(
            [attend_masked(q.double(), k.double(), v.double(), mask, scale=scale) for q, k, v in each], dim=1
        )
    return attended.transpose(1, 2).to(value.dtype, copy=True, memory_format=torch.contiguous_format)


AttentionInterface.register(GROUPED, attend_grouped)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def grouped_attention(config: Any) -> AbstractContextManager[None]:
    """A context in which layers of `config` call `attend_grouped` instead of transformers' sdpa.

    Another thread that runs the model itself at the same time gets the same results from either function. While a graph
    is traced it does nothing, since torch 2.11 does not see what is set there: compiled steps are inside it already."""
    if torch.compiler.is_compiling() or id(config) in _HELD.get():
        return nullcontext()
    if config._attn_implementation_internal not in (STOCK, GROUPED):
        return nullcontext()
    return SharedSwap(config, "_attn_implementation_internal", GROUPED)


@contextmanager
def hold_grouped_attention(config: Any) -> Iterator[None]:
    """`grouped_attention` for many passes: within it, passes of this thread need not ask for it again."""
    with grouped_attention(config):
        token = _HELD.set((*_HELD.get(), id(config)))
        try:
            yield
        finally:
            _HELD.reset(token)
