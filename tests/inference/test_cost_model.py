"""CostModel: interpolation, its file, and measuring on a decoder's own functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference import Decoder, cost_measurement
from inference.auto_tree import AutoTree
from inference.cost_model import (
    MEASURED_ROUNDS,
    NO_TREE,
    WARM_UP_ROUNDS,
    CostModel,
    Plan,
    cache_file,
    load_costs,
    store_costs,
)
from inference.ngram import NgramDrafter
from tests.tiny_targets import tiny_target

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
