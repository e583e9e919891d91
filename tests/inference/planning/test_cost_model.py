"""CostModel: interpolation, its file, and measuring on a decoder's own functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inference import Decoder
from inference.drafters.ngram import NgramDrafter
from inference.planning import cost_measurement
from inference.planning.auto_tree import AutoTree
from inference.planning.cost_model import (
    MEASURED_ROUNDS,
    NO_TREE,
    WARM_UP_ROUNDS,
    BatchCosts,
    CostModel,
    Plan,
    cache_file,
    load_costs,
    store_costs,
)
from tests.tiny_targets import random_prompt, tiny_target

COSTS = CostModel((10, 110), (1, 8, 16), ((1.0, 1.7, 2.5), (2.0, 2.7, 3.5)), 0.5, 0.1, (4, 8), (0.25, 0.45), 0.05, 0.02)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))


def test_costs_lie_between_what_was_measured_and_go_on_beyond_it() -> None:
    assert COSTS.verify_seconds(8, 60) == pytest.approx(2.2)
    assert COSTS.verify_seconds(12, 10) == pytest.approx(2.1)
    assert COSTS.verify_seconds(1, 210) == pytest.approx(3.0)
    assert COSTS.verify_seconds(1, 0) == 1.0
    assert COSTS.plain_seconds(10) == pytest.approx(1.02)
    assert COSTS.step_seconds(Plan(3, 8, 4), 10) == pytest.approx(0.5 + 0.1 + 2 * 0.25 + 1.7 + 0.05)
    assert COSTS.step_seconds(Plan(3, 8, 8), 10) == pytest.approx(0.5 + 0.1 + 2 * 0.45 + 1.7 + 0.05)
    assert COSTS.step_seconds(NO_TREE, 10) == pytest.approx(0.5 + 1.02)
    assert "110 tokens" in COSTS.to_table()


def test_costs_are_stored_and_a_broken_file_is_replaced() -> None:
    assert load_costs(["a"]) is None
    store_costs(["a"], COSTS)
    assert load_costs(["a"]) == COSTS
    assert load_costs(["b"]) is None
    cache_file(["a"]).write_text("{half a fi", encoding="utf-8")
    assert load_costs(["a"]) is None
    store_costs(["a"], COSTS)
    assert load_costs(["a"]) == COSTS


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "file"))
    store_costs(["a"], COSTS)
    assert load_costs(["a"]) is None


def test_costs_are_measured_once_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second decoder of the same models reads what the first has measured."""
    rounds: list[int] = []
    measure = cost_measurement.measure_costs
    monkeypatch.setattr(
        cost_measurement,
        "measure_costs",
        lambda *args, **kwargs: rounds.append(kwargs["num_rounds"]) or measure(*args, **kwargs),
    )
    first, second = (
        Decoder(tiny_target("llama"), NgramDrafter(), tree=AutoTree((1, 3), (4, 8), (2, 3))).costs() for _ in range(2)
    )
    assert first == second
    assert rounds == [WARM_UP_ROUNDS + MEASURED_ROUNDS]


def test_a_decoder_measures_its_own_functions() -> None:
    decoder = Decoder(tiny_target("llama"), NgramDrafter(), tree=AutoTree((1, 3), (4, 8), (2, 3)))
    costs = decoder.costs()
    assert costs.sizes == (1, 4, 8)
    assert all(value > 0 for row in costs.verify for value in row)
    assert costs.extend > 0
    assert costs.widths == (2, 3)
    assert len(costs.level) == 2
    assert decoder.costs() is costs


def test_other_trees_have_no_costs() -> None:
    with pytest.raises(ValueError, match="tree='auto'"):
        Decoder(tiny_target("llama"), NgramDrafter()).costs()


def test_costs_of_batches_between_measured_ones() -> None:
    dear = CostModel((10, 110), (1, 8, 16), ((3.0,) * 3, (4.0,) * 3), 2.5, 0.3, (4, 8), (1.25, 1.45), 0.05, 0.04)
    costs = BatchCosts({5: dear, 1: COSTS})
    assert costs.at(5) is dear
    half = costs.at(3)
    assert half is costs.at(3)
    assert half.verify_seconds(8, 10) == pytest.approx((1.7 + 3.0) / 2)
    plan = Plan(3, 8, 8)
    both = COSTS.step_seconds(plan, 60), dear.step_seconds(plan, 60)
    assert half.step_seconds(plan, 60) == pytest.approx(sum(both) / 2)
    assert half.plain_seconds(10) == pytest.approx((COSTS.plain_seconds(10) + dear.plain_seconds(10)) / 2)


def test_a_shrinking_batch_is_planned_with_the_costs_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of the rows that are left, from measurements of the whole batch and of one row, made before the text; what
    a step took is learned with the costs it was chosen with."""
    decoder = Decoder(tiny_target("llama"), NgramDrafter(), tree=AutoTree((1, 3), (4, 8), (2, 3)))
    measured: list[tuple[int, bool]] = []
    is_decoding = False
    measure = cost_measurement.measure_costs

    def record(step: object, policy: object, batch_size: int, *args: object, **kwargs: object) -> CostModel:
        measured.append((batch_size, is_decoding))
        return measure(step, policy, batch_size, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(cost_measurement, "measure_costs", record)
    planner = decoder._planner
    assert planner is not None
    chosen: list[tuple[int, CostModel]] = []
    learned: list[CostModel] = []
    learn = planner.learn

    def choosing(costs: CostModel, context: int, confidences: Sequence[float]) -> Plan:
        nonlocal is_decoding
        is_decoding = True
        chosen.append((len(confidences), costs))
        return planner.plans[len(chosen) % len(planner.plans)]  # whatever the machine is busy with

    def learning(*args: Any) -> None:
        learned.append(args[4])
        learn(*args)

    monkeypatch.setattr(planner, "choose", choosing)
    monkeypatch.setattr(planner, "learn", learning)
    planner._asleep = 0
    monkeypatch.setattr(planner, "_sleep", lambda: None)
    prompts = torch.cat([random_prompt(5, seed=seed) for seed in range(3)])
    eos = [8, 21, 50, 61, 77, 100]
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "eos_token_id": eos, "pad_token_id": 0}
    decoder.generate(prompts, seed=[2, 3, 5], max_new_tokens=60, **options)
    assert sorted(measured) == [(1, False), (3, False)]
    ends = {decoder._costs[key]: key[0] for key in decoder._costs}
    sizes = [ends.get(costs, 2) for _, costs in chosen]
    assert set(sizes) == {1, 2, 3}
    assert sizes == sorted(sizes, reverse=True)
    assert all(num_rows <= size <= num_rows + 1 for size, (num_rows, _) in zip(sizes, chosen, strict=True))
    assert [id(costs) for costs in learned] == [id(costs) for _, costs in chosen][: len(learned)]
