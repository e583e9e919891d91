"""dsi.py: the simulation against arithmetic, a scripted drafter, and real processes on a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftsmith.inference import Decoder
from draftsmith.scripts.benchmarks import dsi
from draftsmith.scripts.benchmarks.scripted.counting import ScriptedChances, make_counting_target, make_random_heads
from draftsmith.scripts.benchmarks.servers.simulation import Costs, Setting, simulate, sweep
from tests.processes import TORCHRUN, run_python


def test_the_simulation_agrees_with_arithmetic() -> None:
    """One server, drafts that are always right: a task covers all drafts that came while the server was busy."""
    outcome = simulate(Costs(draft=0.1, verify=1.0), Setting(1, 1.0), 2000)
    assert outcome.tokens_per_second == pytest.approx(10.0, rel=0.05), "the drafter is never idle"
    assert (outcome.wasted, outcome.dropped) == (0.0, 0.0)
    wrong = simulate(Costs(draft=0.1, verify=1.0), Setting(3, 0.0), 2000)
    assert 1.0 / 1.1 <= wrong.tokens_per_second <= 1.0, "plain decoding, and up to a draft later"


def test_a_sweep_compares_with_plain_and_with_waiting() -> None:
    rows = sweep([0.1], [0.0, 0.9], (1, 3), message=0.0, spread=0.05, num_tokens=200)
    assert len(rows) == 4
    for row in rows:
        assert row["over_plain"] == pytest.approx(row["over_synchronous"] * row["synchronous_over_plain"])
        assert row["over_plain"] > (0.85 if row["acceptance"] == 0.0 else 2.0)


def test_scripted_chances_do_the_work_and_are_right_by_chance() -> None:
    target = make_counting_target("tiny", torch.float32, torch.device("cpu"))
    drafter = ScriptedChances(make_random_heads("eagle3", target).for_target(target), target.vocab_size)
    lengths = []
    for drafter.acceptance in (0.0, 0.5, 1.0):
        output = Decoder(target, drafter, tree="chain:2").generate(
            torch.arange(8)[None], max_new_tokens=61, do_sample=False
        )
        assert output.sequences[0].tolist() == list(range(8 + 61))
        lengths.append(output.stats.acceptance_length)
    assert lengths[0] == 1.0 < lengths[1] < lengths[2] == 3.0


def test_one_mode_at_a_time() -> None:
    for options, error in (
        ({}, "give one of --sweep"),
        ({"sweep": True, "shape": "0.4B"}, "give one of --sweep"),
        ({"shape": "2B"}, "allowed are tiny"),
        ({"draw": ["one.json"]}, "with 1 files"),
    ):
        with pytest.raises(ValueError, match=error):
            dsi.DsiArguments(**options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_shape_under_torchrun(tmp_path: Path) -> None:
    """Texts are the same, and the picture can be drawn."""
    program, run, swept = "scripts/benchmarks/dsi.py", tmp_path / "run.json", tmp_path / "sweep.json"
    small = ("--acceptances", "0.5", "0.9", "--num_tokens", "16", "--num_prompts", "2")
    for words in (
        (*TORCHRUN, "2", program, "--shape", "tiny", *small, "--json", str(run)),
        (program, "--sweep", "--ratios", "0.1", *small[:5], "--json", str(swept)),
        (program, "--draw", str(run), str(swept), "--picture", str(tmp_path / "dsi.png")),
    ):
        run_python(*words)
    results = json.loads(run.read_text())["results"]
    assert [(one["same_texts"], one["texts"]) for one in results] == [(2, 2)] * 2
    assert (tmp_path / "dsi.png").stat().st_size > 1000
