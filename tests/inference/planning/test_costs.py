"""StepCosts: ratios from the times of steps."""

from __future__ import annotations

import pytest

from draftsmith.inference.planning.costs import StepCosts
from draftsmith.inference.trees.candidates import CandidateTrees

TREES = CandidateTrees().candidates


def costs_at(num_rows: int = 1) -> StepCosts:
    costs = StepCosts(TREES, 0.05)
    costs.enter(do_sample=False, num_rows=num_rows, length=100)
    return costs


def run(costs: StepCosts, place: int, *seconds: float) -> None:
    for one in seconds:
        costs.learn(place, one)


def test_a_trial_is_measured_beside_the_steps_around_it() -> None:
    costs = costs_at()
    run(costs, 0, 2.0, 2.1, 9.0, 2.0)  # the machine did something else for a step
    run(costs, 2, 3.0)
    assert costs.expect()[2] == pytest.approx(1.5, rel=0.03)
    run(costs, 0, *[4.0] * 9)  # everything takes twice as long now
    run(costs, 2, 6.0, 6.0)
    assert costs.expect()[2] == pytest.approx(1.5, rel=0.03)
    assert costs.expect()[0] == 1.0


def test_plain_steps_are_measured_beside_drafting() -> None:
    costs = costs_at()
    guess = costs.expect()[1]
    run(costs, 1, *[3.0] * 4)
    run(costs, 0, 2.0, 2.0)
    ratios = costs.expect()
    assert ratios[1] == guess
    assert ratios[1] / ratios[0] == pytest.approx(1.5)


def test_new_conditions_begin_with_what_is_known_nearby() -> None:
    simple = [costs_at(rows).expect()[3] for rows in (1, 8)]
    costs = costs_at()
    run(costs, 0, 1.0, 1.0)
    run(costs, 3, 3.0 * simple[0])
    for num_rows, length, guess in ((1, 2000, simple[0]), (8, 100, simple[1])):
        costs.enter(do_sample=False, num_rows=num_rows, length=length)
        assert costs.expect()[3] == pytest.approx(3.0 * guess)
