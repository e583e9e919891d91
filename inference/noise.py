"""Gumbel noise that is a pure function of (row seed, absolute position, token id).

A token is sampled as argmax(log p + noise) (the Gumbel-max trick). The noise of a position does not depend on how the
text was decoded. So drafter and target can share it (drafter-invariant speculative decoding, arXiv 2408.07978), and the
sampled text is the same with any drafter, any tree and any other rows in the batch.

The generator is counter-based: it hashes 32-bit integers, in int32 tensors whose products wrap around. The integers are
the same on CPU, GPU and in compiled code; only the two logarithms may round differently in the last place.

Legend: B batch, P positions, V target vocabulary, C selected tokens.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
# Numbers above 2**31 have 2**32 subtracted, as int32 holds them.
_GOLDEN = 0x9E3779B9 - (1 << 32)  # 2**32 / golden ratio: spreads consecutive integers over the 32 bits
# Multipliers of the 32-bit mixer `lowbias32` (C. Wellons, "Prospecting for hash functions").
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)
_IN_CACHE = 1 << 16  # values that a CPU's core keeps in its cache from one operation to the next


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
    # Two 32-bit keys per position: with one key, two positions of a long text could share all their noise.
    first, second = (_mix(key[:, None] + _int32(positions) * _GOLDEN)[..., None] for key in _keys(row_seeds, (1, 2)))
    columns = _mix(_int32(token_ids) * _GOLDEN)  # [C]
    num_rows = max(1, _IN_CACHE // max(1, len(columns)))
    if positions.device.type != "cpu" or torch.compiler.is_compiling() or first.numel() <= num_rows:
        return _gumbel(columns, first, second)
    parts = zip(first.reshape(-1, 1).split(num_rows), second.reshape(-1, 1).split(num_rows), strict=True)
    return torch.cat([_gumbel(columns, *keys) for keys in parts]).view(*first.shape[:2], -1)


def _gumbel(columns: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Noise [..., C] of columns [C] for positions with the keys `first` and `second` [..., 1], all int32."""
    bits = _mix(columns ^ first)
    bits *= _shift(second, 1) | 1  # an odd factor below 2**31
    # Uniform on 0 .. 2**32 - 1, rounded once: both halves are whole numbers that float32 holds.
    uniform = _shift(bits, 16).float().mul_(65536.0).add_((bits & 0xFFFF).float())
    # -log(-log(1 - u)): the large noise that decides a draw comes from small u, where float32 is precise.
    minus_uniform = uniform.add_(0.5).mul_(-(2.0**-32)).clamp_(min=2.0**-24 - 1.0)
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
        rows = _int32(torch.arange(batch_size))
        words = [_mix(key + rows * _GOLDEN) for key in _keys(torch.tensor([_wrap(seed, 64)]), (3, 4))]
        return _join(*words).to(device)
    if len(seed) != batch_size:
        raise ValueError(f"{len(seed)} seeds for {batch_size} rows: give one int for all rows or one int per row")
    return torch.tensor([_wrap(row, 64) for row in seed], dtype=torch.long, device=device)


def derive_seeds(seeds: Tensor, *numbers: int | Tensor) -> Tensor:
    """Derives one seed for each stream, position or node that `numbers` name: [...] long, all broadcast together.

    The noise of derived seeds is independent of the noise of the seeds themselves.
    """
    words = []
    for stream, word in zip((5, 6), _keys(seeds, (5, 6)), strict=True):
        for number in numbers:
            step = (_int32(number) + 1) * _GOLDEN if isinstance(number, Tensor) else _wrap((number + 1) * _GOLDEN)
            word = _mix(word + step) ^ stream
        words.append(word)
    return _join(*words)


def uniform_noise(seeds: Tensor, count: int) -> Tensor:
    """[B, count] float32 in (0, 1), a pure function of seeds [B] long."""
    places = torch.zeros_like(seeds)[:, None]
    return gumbel_noise(seeds, places, count)[:, 0].neg().exp().neg().exp()


def _wrap(value: int, num_bits: int = 32) -> int:
    """The signed integer with the low bits of `value`."""
    half = 1 << (num_bits - 1)
    return (value + half) % (2 * half) - half


def _int32(values: Tensor) -> Tensor:
    """The low 32 bits of int64."""
    return ((values + (1 << 31)) & _MASK).sub(1 << 31).int()


def _keys(seeds: Tensor, streams: tuple[int, int]) -> list[Tensor]:
    """One independent 32-bit key per seed and stream."""
    low, high = _int32(seeds), _int32(seeds >> 32)
    return [_mix(_mix(low + _wrap(stream * _GOLDEN)) ^ high) for stream in streams]


def _join(high: Tensor, low: Tensor) -> Tensor:
    return (high.long() << 32) | (low.long() & _MASK)


def _shift(x: Tensor, count: int) -> Tensor:
    """x >> count for the bits of an int32, without its sign."""
    return (x >> count) & (_MASK >> count)


def _mix(x: Tensor) -> Tensor:
    """A bijection of int32 in which every input bit moves every output bit."""
    x = _shift(x, 16).bitwise_xor_(x)  # a new tensor, which the next lines may overwrite
    x *= _MIX_1
    x ^= _shift(x, 15)
    x *= _MIX_2
    x ^= _shift(x, 16)
    return x
