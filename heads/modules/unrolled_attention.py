"""The attention of the training-time test (EAGLE-3, arXiv 2503.01840, section 3.2), in memory linear in T.

Query i of step k sees the keys j <= i of step 0, and the key of its own slot i in steps 1 to k, under one softmax.

Legend: B batch, T sequence length, H query heads, G key/value heads, d head size.

Let S_i be the log-sum-exp of all scores of query i. torch's flash kernel (for CPUs, or for CUDA in half precision)
computes the attention over step 0 and its log-sum-exp L_i. The whole attention is the kernel's output scaled by
exp(L_i - S_i), plus exp(s - S_i) v for each key of the own slot, with score s and value v. The kernel's backward pass
recomputes the weights of step 0 as exp(score - L_i); called with S_i and the whole output instead of its own, it
returns the gradients of the whole softmax. (torch's context parallelism merges blocks of keys in the same way.)
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

QUERY_CHUNK = 256
# Up to about this many tokens, the flash kernel's backward pass on CPUs takes twice as long in bfloat16 as in float32.
SHORT = 256


def attend_unrolled(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], window: int | None = None) -> Tensor:
    """The newest step's queries q [B, H, T, d] over the keys and values of all steps, [B, G, T, d] each, step 0 first:
    [B, H, T, d]. With a `window`, of step 0 only the last so many keys up to the own slot are seen."""
    if window is not None and window < q.shape[2]:
        return attend_in_chunks(q, keys, values, window)
    if q.device.type == "cpu" or _has_flash_kernel(q):
        return cast(Tensor, _MergedAttention.apply(q, *keys, *values))
    if len(keys) == 1:  # repeated: for grouped float32 keys torch would build a [T, T] tensor
        return F.scaled_dot_product_attention(q, _repeat(keys[0], q), _repeat(values[0], q), is_causal=True)
    return attend_in_chunks(q, keys, values)


def _has_flash_kernel(q: Tensor) -> bool:
    """Whether torch's flash kernel for CUDA runs on this GPU and takes these queries; it pads no heads."""
    if q.device.type != "cuda" or q.shape[-1] % 8:
        return False
    return torch.backends.cuda.can_use_flash_attention(SDPAParams(q, q, q, None, 0.0, True, False))


def _attend_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Causal attention over step 0 [B, H, T, d], its log-sum-exp [B, H, T], and what else the backward pass reads."""
    if _has_flash_kernel(q):
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)  # grouped keys as they are
        return found[0], found[1], tuple(found[2:8])
    repeated = _repeat(k, q), _repeat(v, q)
    return (*torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, *repeated, 0.0, True), ())


def _attend_first_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, rest: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, given the whole output and its log-sum-exp."""
    if rest:
        *sizes, state, unused = rest
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
        grads: tuple[Tensor, Tensor, Tensor]
        grads = kernel(grad, q, k, v, output, total, *sizes, 0.0, True, state, unused)
        return grads
    dtype = torch.promote_types(q.dtype, torch.float32) if q.shape[2] <= SHORT else q.dtype
    read = [x.to(dtype) for x in (grad, q, _repeat(k, q), _repeat(v, q), output)]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad_q, grad_k, grad_v = kernel(*read, total, 0.0, True)
    return grad_q, _sum_groups(grad_k, k), _sum_groups(grad_v, v)


class _MergedAttention(torch.autograd.Function):
    """Inputs: q, then the keys of all steps, then their values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, *keys_values: Tensor) -> Tensor:
        (first_k, *own_k), (first_v, *own_v) = _halves(keys_values)
        first, first_sum, ctx.rest = _attend_first(q, first_k, first_v)
        if not own_k:
            ctx.save_for_backward(q, first, first_sum, *keys_values)
            return first
        own = [_score(q, k) for k in own_k]
        total = torch.stack([first_sum, *own]).logsumexp(0)  # S, [B, H, T]
        output: Tensor = first * (first_sum - total).exp().unsqueeze(-1)
        for score, v in zip(own, own_v, strict=True):
            output += (score - total).exp().unsqueeze(-1) * _repeat(v, q)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, output, total, *keys_values)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, output, total, *keys_values = ctx.saved_tensors
        grad = grads[0].contiguous()
        (first_k, *own_k), (first_v, *own_v) = _halves(keys_values)
        grad_q, grad_k, grad_v = _attend_first_backward(grad, q, first_k, first_v, output, total, ctx.rest)
        grad_keys, grad_values = [grad_k], [grad_v]
        mean = (grad * output).sum(-1, dtype=total.dtype)
        for k, v in zip(own_k, own_v, strict=True):
            weight = (_score(q, k) - total).exp()
            slope = weight * ((grad * _repeat(v, q)).sum(-1, dtype=total.dtype) - mean) * q.shape[-1] ** -0.5
            grad_q = grad_q + slope.unsqueeze(-1) * _repeat(k, q)
            grad_keys.append(_sum_groups(slope.unsqueeze(-1) * q, k))
            grad_values.append(_sum_groups(weight.unsqueeze(-1) * grad, v))
        return grad_q.to(q.dtype), *grad_keys, *grad_values


def _halves(keys_values: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return keys_values[: len(keys_values) // 2], keys_values[len(keys_values) // 2 :]


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    """[B, G, T, d] -> [B, H, T, d]: for each query head, the key head that it reads."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """The gradient of `_repeat`: [B, H, T, d] -> [B, G, T, d]."""
    return cast(Tensor, x.unflatten(1, (like.shape[1], -1))).sum(2).to(like.dtype)


def _score(q: Tensor, k: Tensor) -> Tensor:
    """[B, H, T], the score of each query with the key of its own slot."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores: Tensor = (q * _repeat(k, q)).sum(-1, dtype=dtype) * q.shape[-1] ** -0.5
    return scores


def attend_in_chunks(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], window: int | None = None) -> Tensor:
    """`attend_unrolled` for any device. Step 0 is a causal product of a few queries at a time, recomputed in the
    backward pass, so that no [T, T] tensor is kept."""
    chunks = []
    for start in range(0, q.shape[2], QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, q.shape[2])
        first = 0 if window is None else max(0, start + 1 - window)
        own = [x[:, :, start:end] for x in (*keys[1:], *values[1:])]
        args: tuple[Any, ...] = (
            *(q[:, :, start:end], keys[0][:, :, first:end], values[0][:, :, first:end], start - first, window),
            *own,
        )
        if torch.is_grad_enabled() and q.shape[2] > QUERY_CHUNK:
            chunks.append(checkpoint(_attend_chunk, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(_attend_chunk(*args))
    return torch.cat(chunks, dim=2)


def _attend_chunk(q: Tensor, keys: Tensor, values: Tensor, offset: int, window: int | None, *own: Tensor) -> Tensor:
    """The keys of the first query's own slot are at place `offset`."""
    _, num_heads, queries, size = q.shape
    own_keys, own_values = _halves(own)
    # Query heads are grouped as [G, H / G], so that keys and values are broadcast.
    q = q.unflatten(1, (keys.shape[1], -1)) * size**-0.5
    seen = torch.ones(queries, keys.shape[2], dtype=torch.bool, device=q.device).tril(offset)
    if window is not None:
        seen = seen.triu(offset + 1 - window)
    scores = (q @ keys[:, :, None].transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))
    own_scores = [(q * k[:, :, None]).sum(-1, keepdim=True, dtype=torch.float32) for k in own_keys]
    weights = torch.cat([scores, *own_scores], dim=-1).softmax(-1).to(values.dtype)
    attended = weights[..., : keys.shape[2]] @ values[:, :, None]
    for step, v in enumerate(own_values):
        attended = attended + weights[..., keys.shape[2] + step, None] * v[:, :, None]
    return attended.reshape(-1, num_heads, queries, size)
