"""Measured costs: what is measured, and where it is kept."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference import Decoder, Target
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.drafters.merged import MergedDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.planning import costs as costs_module
from draftsmith.inference.planning.costs import (
    LEAST_AGE,
    MEASURED_ROUNDS,
    MOST_AGE,
    WARM_UP_ROUNDS,
    StepCosts,
    _describe,
    _describe_drafter,
    cache_file,
    find_costs,
    load_costs,
    store_costs,
)
from draftsmith.inference.runners.compiled import compile_step
from draftsmith.inference.runners.cuda_graphs import graph_step
from draftsmith.inference.step import Step
from draftsmith.inference.trees.auto import gamma_chain
from tests.inference.runners.recorder import Recorder
from tests.lossless.restless import auto_tree
from tests.tiny_targets import random_prompt, tiny_target

COSTS = StepCosts((100, 300), (1.0, 2.0), (1.5, 3.5), (1.2, 1.4), (5, 9))


def test_seconds_grow_with_the_text() -> None:
    assert COSTS.seconds(None, 100) == 1.0
    assert COSTS.seconds(None, 200) == pytest.approx(1.5)
    assert COSTS.seconds(1, 200) == pytest.approx(1.4 + 1.0)
    assert COSTS.seconds(0, 200) == pytest.approx(1.2 + 0.75)  # half the nodes of the largest
    assert COSTS.seconds(None, 10) == 1.0, "nothing is foretold below the first context"
    assert StepCosts((100, 300), (2.0, 1.0), (1.0, 1.0), (1.0,), (2,)).seconds(None, 300) == 2.0, (
        "noise shortens no step"
    )


def test_costs_are_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    one, other = cache_file(["a"]), cache_file(["b"])
    assert load_costs(one) is None
    store_costs(one, COSTS)
    assert load_costs(one) == COSTS
    assert load_costs(other) is None
    undated = {name: value for name, value in asdict(COSTS).items() if name != "measured_at"}
    # Damaged, or of another release.
    for content in ("{", "[]", '{"contexts": [1, 2]}', '{"measured_at": 1}', json.dumps(undated)):
        one.write_text(content, encoding="utf-8")
        assert load_costs(one) is None


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "file"))
    store_costs(cache_file(["a"]), COSTS)
    assert load_costs(cache_file(["a"])) is None


def decode() -> Decoder:
    decoder = Decoder(tiny_target("llama"), NgramDrafter(), tree=auto_tree((1, 3), (4, 8), (2, 3)))
    decoder.generate(random_prompt(4), max_new_tokens=2, do_sample=False)
    return decoder


def test_costs_are_measured_once_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second decoder of the same models reads what the first has measured."""
    rounds: list[int] = []
    measure = costs_module.measure_costs

    def record(*args: Any, **kwargs: Any) -> StepCosts:
        rounds.append(kwargs["num_rounds"])
        return measure(*args, **kwargs)

    monkeypatch.setattr(costs_module, "measure_costs", record)
    decoder = decode()
    choice: Any = decoder._choice
    (costs,) = choice._costs.values()
    decoder.generate(random_prompt(4), max_new_tokens=2, do_sample=False)
    assert [*choice._costs.values()] == [costs]
    other: Any = decode()._choice
    assert other._costs == choice._costs
    assert rounds == [WARM_UP_ROUNDS + MEASURED_ROUNDS]
    assert decoder.policy is not None
    assert len(costs.trees) == len(decoder.policy.candidates)
    assert min(*costs.plain, *costs.largest, *costs.trees) > 0


@pytest.mark.parametrize(
    ("age", "is_doubted", "again"),
    [
        (MOST_AGE - 60, False, False),
        (MOST_AGE + 60, False, True),
        (-60, False, True),  # the clock was set back
        (LEAST_AGE - 60, True, False),
        (LEAST_AGE + 60, True, True),
    ],
)
def test_stored_costs_are_measured_again(
    age: float, is_doubted: bool, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When they are old, or when steps took another time and they are not quite new."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    stored, measured = replace(COSTS, measured_at=time.time() - age), replace(COSTS, plain=(7.0, 8.0))
    monkeypatch.setattr(costs_module, "measure_costs", lambda *args, num_rounds: measured)
    step = step_of()
    file = cache_file(_describe(step, 1, Sampler()))
    store_costs(file, stored)
    expected = measured if again else stored
    assert find_costs(step, 1, Sampler(), [stored] if is_doubted else [COSTS]) == expected
    assert load_costs(file) == expected


def test_costs_take_the_decoders_lock() -> None:
    decoder = decode()
    assert min(decoder.costs(batch_size=2, do_sample=True).trees) > 0
    with decoder._take(), pytest.raises(RuntimeError, match="in the middle of another text"):
        decoder.costs()


def test_fixed_trees_have_no_costs() -> None:
    with pytest.raises(ValueError, match="tree='auto'"):
        Decoder(tiny_target("llama"), NgramDrafter()).costs()


def test_costs_tell_merged_drafters_apart() -> None:
    pairs = [MergedDrafter(NgramDrafter(max_ngram=n), NgramDrafter()) for n in (2, 2, 3)]
    one, same, other = (repr(_describe_drafter(pair)) for pair in pairs)
    assert one == same != other


def step_of(runner: str = "eager") -> Step:
    step = Step(Target.of(tiny_target("llama")), NgramDrafter(), gamma_chain(2))
    if runner == "compiled":
        compile_step(step, [])
    elif runner == "captured":
        graph_step(step, Recorder)
    return step


RUNNERS = ("eager", "captured", "compiled")


def test_costs_tell_runners_apart() -> None:
    assert len({repr(_describe(step_of(runner), 1, Sampler())) for runner in RUNNERS}) == 3


def test_only_graphs_that_outlive_a_cache_are_made_before_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    monkeypatch.setattr(costs_module, "load_costs", lambda file: COSTS)
    monkeypatch.setattr(costs_module, "measure_costs", lambda *args, num_rounds: rounds.append(num_rounds))
    for runner in RUNNERS:
        assert find_costs(step_of(runner), 1, Sampler()) == COSTS
    assert rounds == [1]
