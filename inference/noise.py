"""Gumbel noise that is a pure function of (row seed, absolute position, token id).

A token is sampled as argmax(log p + noise) (the Gumbel-max trick). The noise of a position does not depend on how the
text was decoded. So drafter and target can share it (drafter-invariant speculative decoding, arXiv 2408.07978), and the
sampled text is the same with any drafter, any tree and any other rows in the batch.

The generator is counter-based: it hashes 32-bit integers in int64 tensors. The integers are the same on CPU, GPU and in
compiled code; only the two logarithms may round differently in the last place.

Legend: B batch, P positions, V target vocabulary, C selected tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: spreads consecutive integers over the 32 bits
# Multipliers of the 32-bit mixer `lowbias32` (C. Wellons, "Prospecting for hash functions"). The one above 2**31 has
# 2**32 subtracted: the low 32 bits of the product are the same, and |x * m| < 2**63 never overflows int64.
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)


def gumbel_noise(row_seeds: Tensor, positions: Tensor, token_ids: int | Tensor) -> Tensor:
    """Standard Gumbel noise for the tokens drawn at some positions.

    Args:
        row_seeds: [B] long.
        positions: [B, P] long, absolute position of the token being DRAWN (the first prompt token's is 0).
        token_ids: V for all tokens 0..V-1, or [C] long for these columns only.

    Returns:
        [B, P, V or C] float32, finite.
    """
    if isinstance(token_ids, int):
        token_ids = torch.arange(token_ids, device=positions.device)
    low, high = row_seeds & _MASK, (row_seeds >> 32) & _MASK
    # Two 32-bit keys per position: with one key, two positions of a long text could share all their noise.
    keys = []
    for stream in (1, 2):
        key = _mix(_mix((low + stream * _GOLDEN) & _MASK) ^ high)  # [B]
        keys.append(_mix((key[:, None] + positions * _GOLDEN) & _MASK)[..., None])  # [B, P, 1]
    columns = _mix((token_ids * _GOLDEN) & _MASK)  # [C]
    bits = _mix(columns ^ keys[0])  # [B, P, C]
    bits *= (keys[1] >> 1) | 1  # an odd factor below 2**31
    bits &= _MASK  # uniform on 0 .. 2**32 - 1
    # -log(-log(1 - u)): the large noise that decides a draw comes from small u, where float32 is precise.
    minus_uniform = bits.float().add_(0.5).mul_(-(2.0**-32)).clamp_(min=2.0**-24 - 1.0)
    return minus_uniform.log1p_().neg_().log_().neg_()


def row_seeds(seed: int | Sequence[int] | None, batch_size: int, device: torch.device | str) -> Tensor:
    """One noise seed per row: [B] long.

    Args:
        seed: an int gives row b the seed hash(seed, b). A sequence, array or tensor gives each row its own seed. None
            draws the seeds from torch's global CPU generator, so that `torch.manual_seed` covers sampling.

    Raises:
        ValueError: a seed is not an integer, or a sequence has another length than the batch.
    """
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (batch_size,), dtype=torch.long).to(device)
    if hasattr(seed, "tolist"):  # NumPy's integers and arrays, and tensors
        seed = seed.tolist()
    try:
        seed = [operator.index(row) for row in seed] if isinstance(seed, Sequence) else operator.index(seed)
    except TypeError:
        raise ValueError(f"seed is {seed!r}: give one int for all rows, one int per row, or None") from None
    if isinstance(seed, int):
        rows = torch.arange(batch_size)
        words = []
        for stream in (3, 4):
            word = _mix(torch.tensor((seed + stream * _GOLDEN) & _MASK))
            word = _mix(word ^ ((seed >> 32) & _MASK))
            words.append(_mix((word + rows * _GOLDEN) & _MASK))
        return ((words[0] << 32) | words[1]).to(device)
    if len(seed) != batch_size:
        raise ValueError(f"{len(seed)} seeds for {batch_size} rows: give one int for all rows or one int per row")
    return torch.tensor([_to_int64(row) for row in seed], dtype=torch.long, device=device)


def derive_seeds(seeds: Tensor, *numbers: int | Tensor) -> Tensor:
    """Derives one seed for each stream, position or node that `numbers` name: [...] long, all broadcast together.

    The noise of derived seeds is independent of the noise of the seeds themselves.
    """
    low, high = seeds & _MASK, (seeds >> 32) & _MASK
    words = []
    for stream in (5, 6):
        word = _mix(_mix((low + stream * _GOLDEN) & _MASK) ^ high)
        for number in numbers:
            word = _mix((word + (number + 1) * _GOLDEN) & _MASK) ^ stream
        words.append(word)
    return (words[0] << 32) | words[1]


def uniform_noise(seeds: Tensor, count: int) -> Tensor:
    """[B, count] float32 in (0, 1), a pure function of seeds [B] long."""
    places = torch.zeros_like(seeds)[:, None]
    return gumbel_noise(seeds, places, count)[:, 0].neg().exp().neg().exp()


def _to_int64(value: int) -> int:
    """Wraps a Python int of any size into int64's range."""
    return (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) in which every input bit moves every output bit."""
    high = x >> 16  # a new tensor, which the next lines may overwrite
    high ^= x
    x = high
    x *= _MIX_1
    x &= _MASK
    x ^= x >> 15
    x *= _MIX_2
    x &= _MASK
    x ^= x >> 16
    return x
