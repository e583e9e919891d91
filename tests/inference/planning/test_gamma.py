"""Gamma against a simulation of the paper's assumptions, and chains whose length is chosen against its formula."""

from __future__ import annotations

import random

import pytest
import torch

from inference import Decoder, DynamicTree, chain, generate
from inference.drafters.sampling import DraftSampling
from inference.drafters.small_model import SmallModelDrafter
from inference.planning.auto_tree import AutoTree
from inference.planning.cost_model import NO_TREE, CostModel, Plan
from inference.planning.gamma import (
    cost_ratio_of,
    estimate_alpha,
    expected_speedup,
    gamma_chain,
    measured_gamma,
    optimal_gamma,
)
from inference.planning.tree_planner import TreePlanner
from inference.stats import GenerationStats
from inference.trees.policy import resolve_policy
from tests.inference.drafters.test_small_model import rough_copy
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target


def accept(alpha: float, gamma: int, numbers: random.Random) -> int:
    """Tokens of a chain that are accepted, each with the same chance."""
    for place in range(gamma):
        if numbers.random() >= alpha:
            return place
    return gamma


@pytest.mark.parametrize(("alpha", "cost_ratio", "gamma"), [(0.3, 0.1, 2), (0.8, 0.05, 5), (0.6, 0.0, 3)])
def test_the_formula_is_the_mean_of_a_simulation(alpha: float, cost_ratio: float, gamma: int) -> None:
    numbers = random.Random(0)
    steps = 20000
    tokens = sum(1 + accept(alpha, gamma, numbers) for _ in range(steps))
    measured = tokens / (steps * (1 + gamma * cost_ratio))
    assert expected_speedup(alpha, cost_ratio, gamma) == pytest.approx(measured, rel=0.02)
    closed = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * cost_ratio + 1))
    assert expected_speedup(alpha, cost_ratio, gamma) == pytest.approx(closed)


def test_the_best_gamma() -> None:
    assert optimal_gamma(0.8, 0.05, 20) == 8
    assert optimal_gamma(0.8, 0.05, 3) == 3
    assert optimal_gamma(1.0, 0.5, 6) == 6
    assert optimal_gamma(0.9, 1.0) == optimal_gamma(0.0, 0.1) == 0, "a drafter as slow as the target never pays"
    for alpha, cost_ratio, limit in ((1.1, 0.1, 4), (0.5, -0.1, 4), (0.5, 0.1, -1)):
        with pytest.raises(ValueError, match="allowed are a chance from 0 to 1"):
            optimal_gamma(alpha, cost_ratio, limit)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.2, 1), (0.5, 4), (0.9, 6)])
def test_alpha_is_found_again(alpha: float, gamma: int) -> None:
    numbers = random.Random(1)
    histogram = [0] * (gamma + 1)
    for _ in range(20000):
        histogram[accept(alpha, gamma, numbers)] += 1
    assert estimate_alpha(histogram, gamma) == pytest.approx(alpha, abs=0.01)
    with pytest.raises(ValueError, match="no step that accepted more"):
        estimate_alpha(histogram, gamma - 1)


def test_gamma_from_what_was_measured() -> None:
    """Whatever chain was run, the gamma is that of the alpha and the c behind the numbers."""
    costs = CostModel((64, 512), (1, 9), ((0.5, 0.6), (1.0, 1.2)), 0.2, 0.0, (1,), (0.1,), 0.0, 0.0)
    assert cost_ratio_of(costs, 512) == pytest.approx(0.1)
    assert cost_ratio_of(costs, 64) == pytest.approx(0.2)
    numbers = random.Random(0)
    for alpha in (0.05, 0.6, 0.9):
        for gamma in (2, 5):
            stats = GenerationStats()
            for _ in range(20000):
                stats.count_step(accept(alpha, gamma, numbers))
            assert measured_gamma(stats, gamma, costs) == optimal_gamma(alpha, 0.1)
            assert measured_gamma(stats, gamma, costs, context=64, max_gamma=3) == optimal_gamma(alpha, 0.2, 3)
    with pytest.raises(ValueError, match="no step that accepted more"):
        measured_gamma(stats, 4, costs)
    with pytest.raises(ValueError, match="at least one step"):
        measured_gamma(GenerationStats(), 4, costs)


def test_gamma_from_a_run() -> None:
    model = tiny_target("llama", initializer_range=0.3)
    drafter = SmallModelDrafter(rough_copy(model))
    costs = Decoder(model, drafter, tree="gamma").costs()
    stats = Decoder(model, drafter, tree=chain(4)).generate(random_prompt(12), max_new_tokens=60, do_sample=False).stats
    assert 0 <= measured_gamma(stats, 4, costs) <= 8


def test_its_trees_are_chains() -> None:
    policy = gamma_chain(4)
    assert policy.is_chain
    assert all(policy.tree_of(plan).is_chain for plan in policy.plans)
    assert not any(tree.is_chain for tree in (AutoTree(), AutoTree(widths=(1,)), DynamicTree(3, 1, 4)))
    assert [(plan.depth, plan.num_nodes, plan.width) for plan in policy.plans] == [
        (gamma, gamma + 1, 1) for gamma in range(1, 5)
    ]
    text = torch.arange(20)
    for plan in policy.plans:
        drafter = ScriptedDrafter([text], VOCAB_SIZE, ranks=(0,))
        draft = drafter.extend(
            drafter.start(1, 32, 8), torch.zeros(1, 5, 2), text[None, 1:6], torch.tensor([5]), max_slots=5
        )
        state = drafter.start(1, 32, 8)
        state.lengths += 5
        grown = [
            tree.grow(drafter, state, text[5:6], draft, DraftSampling())
            for tree in (policy.tree_of(plan), chain(plan.depth))
        ]
        assert [tree.token_ids.tolist() for tree in grown] == [[list(range(5, 6 + plan.depth))]] * 2
        assert [tree.parents.tolist() for tree in grown] == [[[*range(-1, plan.depth)]]] * 2
    assert resolve_policy("gamma", 3).max_depth == 3
    with pytest.raises(ValueError, match="at least 1 token"):
        gamma_chain(0)


@pytest.mark.parametrize(("alpha", "cost_ratio"), [(0.3, 0.05), (0.6, 0.1), (0.85, 0.05), (0.85, 0.3)])
def test_the_planner_finds_the_papers_gamma(alpha: float, cost_ratio: float) -> None:
    """Under the paper's assumptions: what it chooses is worth all but a few percent of the best."""
    policy = gamma_chain(8)
    sizes = (1, *policy.sizes)
    # A drafter's pass costs `cost_ratio` at each level, the root's children included.
    costs = CostModel((8,), sizes, ((1.0,) * len(sizes),), cost_ratio, 0.0, (1,), (cost_ratio,), 0.0, 0.0)
    planner, numbers = TreePlanner(policy), random.Random(2)
    chosen: list[Plan] = []
    for _ in range(3000):
        if not planner.is_drafting:
            planner.pass_step()
            continue
        plan = planner.choose(costs, 8, [0.6])
        luck = accept(alpha, 8, numbers)
        accepted = [min(luck, other.depth) for other in policy.plans]
        taken = 0 if plan == NO_TREE else min(luck, plan.depth)
        planner.learn(plan, [0.6], [taken], [() if plan == NO_TREE else accepted], costs, 8)
        chosen.append(plan)
    last = chosen[len(chosen) // 2 :]
    mean = sum(expected_speedup(alpha, cost_ratio, plan.depth) for plan in last) / len(last)
    best = expected_speedup(alpha, cost_ratio, optimal_gamma(alpha, cost_ratio))
    assert mean > 0.95 * best


def test_decoding_with_gamma() -> None:
    model = tiny_target("llama", initializer_range=0.3)
    drafter = SmallModelDrafter(rough_copy(model))
    prompt = random_prompt(12)
    for options in ({"do_sample": False}, {"do_sample": True, "seed": 1}):
        expected = generate(model, None, prompt, max_new_tokens=60, **options).sequences
        decoder = Decoder(model, drafter, tree="gamma")
        for _ in range(2):
            assert torch.equal(decoder.generate(prompt, max_new_tokens=60, **options).sequences, expected)
