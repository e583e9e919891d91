"""The noise's distribution, independence and reproducibility, against a slow hash written with Python integers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference.noise import gumbel_noise, row_seeds

MASK = 2**32 - 1
FROZEN_NOISE = [-1.160369, 2.746974, 0.294903]
FROZEN_SEEDS = [2459827682024539099, 1929863720152401672]


def hash_32(x: int) -> int:
    """The 32-bit mixer, in Python integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ (x >> 16)


def slow_gumbel(seed: int, position: int, token: int) -> float:
    """One value, from the definition."""
    golden = 0x9E3779B9
    seed %= 2**64
    first, second = (
        hash_32((hash_32(hash_32((seed + stream * golden) & MASK) ^ (seed >> 32)) + position * golden) & MASK)
        for stream in (1, 2)
    )
    bits = hash_32(hash_32(token * golden & MASK) ^ first) * ((second >> 1) | 1) & MASK
    return -math.log(-math.log1p(-(bits + 0.5) / 2**32))


def draw(num_seeds: int = 48, num_positions: int = 64, num_tokens: int = 512) -> Tensor:
    """Noise [B, P, V] in float64 for neighbouring seeds, positions and tokens."""
    positions = torch.arange(num_positions).expand(num_seeds, num_positions)
    return gumbel_noise(torch.arange(num_seeds), positions, num_tokens).double()


def to_standard_scores(noise: Tensor) -> Tensor:
    """The uniforms from which the noise is made, shifted and scaled to mean 0 and variance 1."""
    return (torch.exp(-torch.exp(-noise)) - 0.5) * math.sqrt(12)


def test_values_equal_the_slow_definition() -> None:
    seeds = torch.tensor([0, 5, -1, 2**63 - 1, -(2**63), 123456789012345])
    positions = torch.tensor([[0, 1, 4095, 131071, 2**31]]).expand(6, 5)
    tokens = torch.tensor([0, 1, 127, 32000, 262143])
    noise = gumbel_noise(seeds, positions, tokens)
    assert noise.dtype == torch.float32
    for row, seed in enumerate(seeds.tolist()):
        for column, position in enumerate(positions[0].tolist()):
            for index, token in enumerate(tokens.tolist()):
                wanted = slow_gumbel(seed, position, token)
                assert float(noise[row, column, index]) == pytest.approx(wanted, abs=2e-5)


def test_values_are_frozen() -> None:
    """Text sampled with a seed must stay the same text in every release."""
    noise = gumbel_noise(row_seeds(0, 1, "cpu"), torch.tensor([[17]]), 3)
    assert noise[0, 0].tolist() == pytest.approx(FROZEN_NOISE, abs=1e-5)
    assert row_seeds(0, 2, "cpu").tolist() == FROZEN_SEEDS


def test_the_winning_token_is_uniform() -> None:
    """With equal probabilities every token wins equally often: what sampling needs of the upper tail."""
    winners = draw(num_tokens=128).argmax(-1).flatten()
    counts = torch.bincount(winners, minlength=128).double()
    expected = winners.numel() / 128
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 127) < 4 * math.sqrt(2 * 127)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "positions", "tokens"])
def test_no_pair_correlates(axis: int) -> None:
    """Every pair of seeds, of positions and of the first tokens."""
    scores = to_standard_scores(draw(num_tokens=256)).movedim(axis, 0).flatten(1)
    correlation = scores @ scores.T / math.sqrt(scores.shape[1])
    correlation.fill_diagonal_(0)
    assert float(correlation.abs().max()) < 5.5


def test_a_value_depends_on_seed_position_and_token_alone() -> None:
    seeds = row_seeds(3, 4, "cpu")
    positions = torch.tensor([[5, 9, 100], [7, 8, 9], [0, 1, 2], [9, 9, 9]])
    noise = gumbel_noise(seeds, positions, 1000)
    tokens = torch.tensor([999, 0, 17, 17])
    assert torch.equal(gumbel_noise(seeds, positions, tokens), noise[..., tokens])
    assert torch.equal(gumbel_noise(seeds, positions, 200), noise[..., :200])
    assert torch.equal(gumbel_noise(seeds[2:3], positions[2:3], 1000), noise[2:3])
    assert torch.equal(gumbel_noise(seeds, positions[:, 1:2], 1000), noise[:, 1:2])
    assert torch.equal(noise[3, 0], noise[3, 2])
    assert not torch.equal(noise[0, 1], noise[1, 2])  # position 9 of two rows


class TestRowSeeds:
    def test_an_int_gives_different_seeds_whatever_the_batch(self) -> None:
        seeds = row_seeds(42, 100, "cpu")
        assert len(set(seeds.tolist())) == 100
        assert torch.equal(row_seeds(42, 7, "cpu"), seeds[:7])
        assert not set(row_seeds(43, 100, "cpu").tolist()) & set(seeds.tolist())

    def test_large_and_negative_seeds_are_told_apart(self) -> None:
        values = [0, 1, -1, 2**32, -(2**32), 2**63, 2**64 - 2]  # taken modulo 2**64
        assert len({int(row_seeds(value, 1, "cpu")) for value in values}) == len(values)

    def test_a_sequence_is_taken_as_it_is(self) -> None:
        assert row_seeds([3, -4, 2**63], 3, "cpu").tolist() == [3, -4, -(2**63)]
        with pytest.raises(ValueError, match="2 seeds for 3 rows"):
            row_seeds([1, 2], 3, "cpu")

    @pytest.mark.parametrize("seed", [1.5, torch.tensor(0.5)])
    def test_what_is_no_integer_is_refused(self, seed: Any) -> None:
        with pytest.raises(ValueError, match=r"seed is .*\.5"):
            row_seeds(seed, 2, "cpu")

    def test_none_draws_from_torchs_global_generator(self) -> None:
        torch.manual_seed(5)
        first, second = row_seeds(None, 4, "cpu"), row_seeds(None, 4, "cpu")
        torch.manual_seed(5)
        assert torch.equal(row_seeds(None, 4, "cpu"), first)
        assert not torch.equal(first, second)
