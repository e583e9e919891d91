"""StepCosts: ratios from the times of steps."""

import math

import pytest

from draftsmith.inference import Decoder, NgramDrafter
from draftsmith.inference.planning.costs import StepCosts
from draftsmith.inference.trees.candidates import CandidateTrees, gamma_chain
from tests.tiny_targets import random_prompt, tiny_target

TREES = CandidateTrees().candidates


def costs_at(
    num_rows: int = 1, length: int = 100, stored: dict[tuple[bool, int, int], list[float]] | None = None
) -> StepCosts:
    costs = StepCosts(TREES, 0.05, stored or {})
    costs.enter(do_sample=False, num_rows=num_rows, length=length)
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
    run(costs, 1, *[3.0] * 4)
    run(costs, 0, 2.0, 2.0)
    assert costs.expect()[:2] == pytest.approx([1.0, 1.5])
    run(costs, 1, *[3.0] * 4)
    run(costs, 2, 4.0, 4.0)
    assert costs.expect()[2] == pytest.approx(2.0), "beside plain steps, by way of those with the first policy"


def test_what_was_measured_beside_a_wrong_guess_is_measured_again() -> None:
    costs = costs_at()
    run(costs, 1, *[3.0] * 4)
    run(costs, 2, *[6.0] * 4)
    assert costs.age == math.inf, "beside plain steps nothing was measured"
    assert costs.expect()[2] < 3.0
    run(costs, 1, *[3.0] * 9)
    run(costs, 0, 2.0, 2.0)
    run(costs, 1, 3.0)
    assert costs.age == 1
    run(costs, 2, *[6.0] * 3)
    assert costs.expect()[1:3] == pytest.approx([1.5, 3.0])


def test_a_clock_that_stands_still_tells_nothing() -> None:
    costs = costs_at()
    guesses = costs.expect()[:]
    run(costs, 0, *[0.0] * 4)
    run(costs, 1, *[0.0] * 4)
    assert costs.expect() == guesses


def test_policies_that_have_not_run_miss_their_guesses_as_others_do() -> None:
    costs = costs_at()
    guesses = costs.expect()[:]
    run(costs, 0, *[1.0] * 3)
    run(costs, 3, *[1.0] * 4)
    assert costs.expect()[4] - 1.0 < 0.7 * (guesses[4] - 1.0)
    assert costs.expect()[5] - 1.0 < 0.7 * (guesses[5] - 1.0)


def test_what_was_stored_by_chance_below_a_plain_step_leaves_costs_above_it() -> None:
    costs = costs_at(1, 100, {(False, 1, 3): [1.0, 1.02, 0.95, 0.9, 0.95, 0.97]})
    run(costs, 0, *[1.0] * 3)
    run(costs, 1, *[4.0] * 4)
    assert costs.expect() == pytest.approx([1.0, 4.0, 1.0, 1.0, 1.0, 1.0])


def test_one_long_step_does_not_end_a_policy() -> None:
    costs = costs_at()
    guess = costs.expect()[2]
    run(costs, 0, *[1.0] * 3)
    run(costs, 2, 9.0)
    assert costs.expect()[2] < 1.5 * guess
    run(costs, 0, 1.0)
    run(costs, 2, 9.0, 9.0)
    assert costs.expect()[2] == pytest.approx(9.0), "it was not by chance"


def test_new_conditions_begin_with_what_is_known_nearby() -> None:
    simple = [costs_at(rows).expect()[3] for rows in (1, 8)]
    stored = {(False, 1, 3): [1.0, 1.1, 1.2, 3.0 * simple[0], 1.4, 1.5]}
    assert costs_at(1, 2000, stored).expect()[3] == pytest.approx(3.0 * simple[0])
    assert costs_at(8, 100, stored).expect()[3] == pytest.approx(3.0 * simple[1])


def test_a_first_time_replaces_what_was_stored() -> None:
    stored = {(False, 1, 3): [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}
    costs = costs_at(1, 100, stored)
    assert costs.learned() == {}, "nothing that was not measured here is stored again with today's date"
    run(costs, 0, 1.0, 1.0)
    run(costs, 5, 4.0, 4.0)
    assert costs.expect() == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4, 4.0])
    assert [*costs.learned()] == [(False, 1, 3)]


def test_a_decoder_tells_its_costs() -> None:
    decoder = Decoder(tiny_target("llama"), NgramDrafter(), tree=gamma_chain(2))
    guesses = decoder.costs()
    assert len(guesses) == 3
    for _ in range(4):  # when a tree is tried depends on the clock
        decoder.generate(random_prompt(4), max_new_tokens=100, do_sample=False, eos_token_id=None)
    assert any(decoder.costs(length=length) != guesses for length in (10, 40, 100))
    assert decoder.costs(8, do_sample=True)[0] == pytest.approx(decoder.costs()[0])


def test_fixed_trees_have_no_costs() -> None:
    with pytest.raises(ValueError, match="tree='auto' or 'gamma'; this decoder has a StaticTree"):
        Decoder(tiny_target("llama"), NgramDrafter(), tree="chain:2").costs()
    with pytest.raises(ValueError, match="a drafter and tree='auto' or 'gamma'; this decoder has no drafter"):
        Decoder(tiny_target("llama")).costs()
