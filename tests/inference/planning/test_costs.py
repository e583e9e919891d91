"""Measured costs: what is measured, and where it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference import Decoder
from inference.drafters.merged import MergedDrafter
from inference.drafters.ngram import NgramDrafter
from inference.planning import costs as costs_module
from inference.planning.costs import (
    MEASURED_ROUNDS,
    WARM_UP_ROUNDS,
    StepCosts,
    _describe_drafter,
    cache_file,
    load_costs,
    store_costs,
)
from tests.lossless.restless import auto_tree
from tests.tiny_targets import tiny_target

COSTS = StepCosts((100, 300), (1.0, 2.0), (1.5, 3.5), (1.2, 1.4))


def test_seconds_grow_with_the_text() -> None:
    assert COSTS.plain_seconds(100) == 1.0
    assert COSTS.plain_seconds(200) == pytest.approx(1.5)
    assert COSTS.tree_seconds(1, 200) == pytest.approx(1.4 + 1.0)
    assert COSTS.plain_seconds(10) == 1.0, "nothing is foretold below the first context"
    assert StepCosts((100, 300), (2.0, 1.0), (1.0, 1.0), (1.0,)).plain_seconds(300) == 2.0, "noise shortens no step"


def test_costs_are_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    assert load_costs(["a"]) is None
    store_costs(["a"], COSTS)
    assert load_costs(["a"]) == COSTS
    assert load_costs(["b"]) is None
    for content in ("{", "[]", '{"contexts": [1, 2]}'):  # damaged, or of another release
        cache_file(["a"]).write_text(content, encoding="utf-8")
        assert load_costs(["a"]) is None


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "file"))
    store_costs(["a"], COSTS)
    assert load_costs(["a"]) is None


def make_decoder() -> Decoder:
    return Decoder(tiny_target("llama"), NgramDrafter(), tree=auto_tree((1, 3), (4, 8), (2, 3)))


def test_costs_are_measured_once_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second decoder of the same models reads what the first has measured."""
    rounds: list[int] = []
    measure = costs_module.measure_costs

    def record(*args: Any, **kwargs: Any) -> StepCosts:
        rounds.append(kwargs["num_rounds"])
        return measure(*args, **kwargs)

    monkeypatch.setattr(costs_module, "measure_costs", record)
    decoder = make_decoder()
    costs = decoder.costs()
    assert decoder.costs() is costs
    assert make_decoder().costs() == costs
    assert rounds == [WARM_UP_ROUNDS + MEASURED_ROUNDS]
    assert decoder.policy is not None
    assert len(costs.trees) == len(decoder.policy.candidates)
    assert min(*costs.plain, *costs.largest, *costs.trees) > 0


def test_costs_take_the_decoders_lock() -> None:
    decoder = make_decoder()
    with decoder._alone(), pytest.raises(RuntimeError, match="in the middle of another text"):
        decoder.costs()


def test_fixed_trees_have_no_costs() -> None:
    with pytest.raises(ValueError, match="tree='auto'"):
        Decoder(tiny_target("llama"), NgramDrafter()).costs()


def test_costs_tell_merged_drafters_apart() -> None:
    pairs = [MergedDrafter(NgramDrafter(max_ngram=n), NgramDrafter()) for n in (2, 2, 3)]
    one, same, other = (repr(_describe_drafter(pair)) for pair in pairs)
    assert one == same != other
