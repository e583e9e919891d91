"""Gamma, the number of tokens a chain drafts: the paper's formula, and chains whose gamma is chosen as they run.

The paper (Leviathan et al., arXiv 2211.17192) takes every drafted token to be accepted with the same chance alpha,
whatever came before, and a verify pass to cost the same whatever gamma. `gamma_chain` (`tree="gamma"`) drops both: it
is an `AutoTree` that has chains alone to choose from, whose planner measures what each gamma accepts and costs.
`measured_gamma` is the paper's own choice, from one run of a fixed chain:

    costs = Decoder(target, drafter, tree="gamma").costs()
    stats = Decoder(target, drafter, tree=chain(4)).generate(**prompt, max_new_tokens=256).stats
    gamma = measured_gamma(stats, 4, costs)        # then tree=chain(gamma), or no drafter if it is 0
"""

from __future__ import annotations

from collections.abc import Sequence

from inference.planning.auto_tree import AutoTree
from inference.planning.cost_model import CostModel
from inference.stats import GenerationStats

MAX_GAMMA = 8


def expected_speedup(alpha: float, cost_ratio: float, gamma: int) -> float:
    """How many times faster than plain decoding chains of `gamma` tokens are (theorem 3.8):
    (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)).

    Args:
        alpha: chance that a drafted token is accepted, given that those before it were.
        cost_ratio: c, seconds of a pass of the drafter over those of the target.

    >>> expected_speedup(0.5, 0.0, 1), expected_speedup(1.0, 0.25, 4)
    (1.5, 2.5)
    """
    tokens = sum(alpha**depth for depth in range(gamma + 1))
    return tokens / (gamma * cost_ratio + 1.0)


def optimal_gamma(alpha: float, cost_ratio: float, max_gamma: int = MAX_GAMMA) -> int:
    """The gamma that makes decoding fastest (section 3.5), from 0 (no drafting pays) to `max_gamma`.

    >>> optimal_gamma(0.8, 0.05, 20), optimal_gamma(0.5, 0.05), optimal_gamma(0.1, 0.5)
    (8, 3, 0)
    """
    if not 0 <= alpha <= 1 or cost_ratio < 0 or max_gamma < 0:
        raise ValueError(
            f"got alpha={alpha}, cost_ratio={cost_ratio} and max_gamma={max_gamma}; allowed are a chance from 0 to 1, "
            "a ratio from 0 and a number from 0"
        )
    return max(range(max_gamma + 1), key=lambda gamma: expected_speedup(alpha, cost_ratio, gamma))


def estimate_alpha(accepted_histogram: Sequence[int], gamma: int) -> float:
    """The most likely alpha of chains of `gamma` tokens, from how many steps accepted 0, 1, 2, ... of them
    (`GenerationStats.accepted_histogram`): of the drafted tokens that were looked at, the share that was accepted. A
    step that accepted fewer than gamma looked at one more and refused it.

    >>> estimate_alpha([1, 0, 1], 2)
    0.6666666666666666
    """
    if gamma < 1 or not sum(accepted_histogram) or len(accepted_histogram) > gamma + 1:
        raise ValueError(
            f"got {list(accepted_histogram)} and gamma={gamma}; the histogram of chains of gamma tokens (at least 1) "
            "has at least one step and no step that accepted more"
        )
    accepted = sum(number * steps for number, steps in enumerate(accepted_histogram))
    refused = sum(accepted_histogram[:gamma])
    return accepted / (accepted + refused)


def cost_ratio_of(costs: CostModel, context: int) -> float:
    """c at so many tokens in the cache: a level of a chain over a pass of the target over one token."""
    return costs.level_seconds(1) / costs.verify_seconds(1, context)


def measured_gamma(
    stats: GenerationStats, gamma: int, costs: CostModel, *, context: int = 512, max_gamma: int = MAX_GAMMA
) -> int:
    """`optimal_gamma` for what was measured: alpha from a run, c from costs.

    Args:
        stats: of generations with chains of `gamma` tokens, all of that length.
        costs: `Decoder.costs` of a decoder with trees of chosen sizes and more than one level, such as tree="gamma".
        context: tokens in the cache, at which c is taken.

    Raises:
        ValueError: for the statistics of longer chains, or of no step at all.
    """
    alpha = estimate_alpha(stats.accepted_histogram, gamma)
    return optimal_gamma(alpha, cost_ratio_of(costs, context), max_gamma)


def gamma_chain(max_gamma: int = MAX_GAMMA) -> AutoTree:
    """Chains of 1 to `max_gamma` tokens, or none, chosen at every step (`tree="gamma"`)."""
    if max_gamma < 1:
        raise ValueError(f"max_gamma is {max_gamma}; a chain has at least 1 token")
    depths = range(1, max_gamma + 1)
    return AutoTree(depths, [depth + 1 for depth in depths], (1,), root_factor=1)
