"""results.py: every decoded prompt is kept, the same command goes on, and what is made of the numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.heads import create_heads
from draftsmith.inference import Target
from draftsmith.scripts.benchmarks import results
from draftsmith.scripts.benchmarks.llama_cpp import write_llama
from draftsmith.scripts.benchmarks.results import Cells, ResultsArguments
from draftsmith.scripts.benchmarks.results_summary import make_content, render_page
from draftsmith.scripts.measuring.contenders import NGRAMS
from draftsmith.scripts.measuring.measure import PLAIN, TRANSFORMERS


@pytest.fixture(scope="module")
def target(small_chat: str) -> Target:
    return Target(AutoModelForCausalLM.from_pretrained(small_chat, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EAGLE-3 heads, which are also the only checkpoint of a run."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("eagle3", "checkpoint-3"):
        torch.manual_seed(0)
        create_heads("eagle3", target).save_pretrained(folder / name)
    (folder / "checkpoint-3" / "trainer_state.json").write_text(json.dumps({"num_input_tokens_seen": 1_500_000}))
    return folder


@pytest.fixture
def options(small_chat: str, target: Target, heads: Path, tmp_path: Path) -> dict[str, Any]:
    files = tmp_path / "prompts"
    files.mkdir()
    for name in ("a", "b"):
        lines = [json.dumps({"id": f"{name}{number}", "turns": [f"Count to {number}"]}) for number in range(3)]
        (files / f"{name}.jsonl").write_text("\n".join(lines))
    write_llama(tmp_path / "small.Q4_1.gguf", target)
    found: dict[str, Any] = {"target": small_chat, "prompts": [str(files)], "heads": [str(heads / "eagle3")]}
    found |= {"curve": [str(heads)], "tree": ["chain:2"], "gguf": str(tmp_path / "small.Q4_1.gguf")}
    numbers = {"limit": 1, "max_new_tokens": 6, "threads": [1]}
    places = {"cells": str(tmp_path / "cells.jsonl"), "output": str(tmp_path / "out")}
    return {**found, **numbers, **places, "temperature": [0.0, 1.0], "dtype": "float32", "compile": False}


def test_a_run_that_is_killed_goes_on(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    add, kept = Cells.add, []

    def die(cells: Cells, key: Any, **values: Any) -> None:
        add(cells, key, **values)
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.append(key)

    with monkeypatch.context() as patch:
        patch.setattr(Cells, "add", die)
        with pytest.raises(KeyboardInterrupt):
            results.run(ResultsArguments(**options))
    file = Path(options["cells"])
    file.write_text(file.read_text() + '{"key": ["speed", 1, 0.0, ')
    before = file.read_text().splitlines()[:4]
    content = results.run(ResultsArguments(**options))
    lines = file.read_text().splitlines()
    assert lines[:4] == before, "the conditions, and three cells"
    keys = [json.loads(line)["key"] for line in lines[1:]]
    assert [key[0] for key in keys] == ["speed"] * 4 + ["curve"] * 2
    assert [key[2:4] for key in keys[:4]] == [[0.0, "a"], [1.0, "a"], [0.0, "b"], [1.0, "b"]]

    rows = {(one["name"], one["tree"]): one for one in content["reports"][-1]["rows"] if not one["problem"]}
    assert set(rows) == {
        *((name, "") for name in (TRANSFORMERS, PLAIN, f"{PLAIN}, packed")),
        *((name, "chain:2") for name in (NGRAMS, "eagle3")),
    }
    assert all(row["num_identical"] == row["num_compared"] == 2 for key, row in rows.items() if key[0] != TRANSFORMERS)
    rivals = {"llama.cpp float32", "llama.cpp Q4_1"}
    problems = {one["name"]: one["problem"] for one in content["reports"][-1]["rows"] if one["problem"]}
    assert rivals < set(problems)
    assert all("pip install xllamacpp" in problems[name] for name in rivals)
    assert [one["millions"] for one in content["curve"]] == [1.5]
    assert "1.5 M tokens" in (tmp_path / "out.md").read_text()
    assert "plain decoding, packed" in (tmp_path / "out.svg").read_text()

    assert results.run(ResultsArguments(**options | {"limit": 2, "minutes": 1e-9})) == content, "no time for more"
    monkeypatch.setattr(results, "measure_curve", None)
    more = results.run(ResultsArguments(**options | {"limit": 2, "parts": ["speed"]}))
    assert [one["num_prompts"] for one in more["reports"]] == [2, 2, 4] * 2
    assert file.read_text().splitlines()[: len(lines)] == lines
    with pytest.raises(ValueError, match="max_new_tokens 6 there, 7 now"):
        results.run(ResultsArguments(**options | {"max_new_tokens": 7}))


def make_cells() -> list[dict[str, Any]]:
    """Two prompts; the drafter is twice and four times as fast as `generate`. The heads of the curve were replaced."""

    def run(name: str, seconds: float, steps: int, tree: str = "") -> dict[str, Any]:
        return {
            "name": name,
            "tree": tree,
            "tokens": 8,
            "seconds": seconds,
            "steps": steps,
            "step_tokens": 8,
            "same": True,
        }

    cells = [
        {"key": ["speed", 1, 0.0, file, "0"], "problems": {"llama.cpp": "it is not here"}}
        | {"runs": [run(TRANSFORMERS, 4.0, 8), run(PLAIN, 2.0, 8), run("mtp", seconds, steps, "chain:3")]}
        for file, seconds, steps in (("a", 2.0, 4), ("b", 1.0, 2))
    ]
    for weights, steps in (("old", 8), ("new", 4)):
        cells.append({"key": ["curve", "mtp", 0.5, weights, "chain:3", "a", "0"], "steps": steps, "step_tokens": 8})
    return cells


def test_the_numbers_that_follow_from_cells() -> None:
    content = make_content({"target": "t"}, make_cells())
    every = next(one for one in content["reports"] if one["prompts"] == "all")
    mtp = next(row for row in every["rows"] if row["name"] == "mtp")
    assert (mtp["over_transformers"], mtp["over_plain"]) == (3.0, 1.5)
    assert mtp["acceptance_length"] == pytest.approx(16 / 6)
    assert mtp["tokens_per_second"] == pytest.approx(16 / 3)
    assert content["curve"] == [{"name": "mtp", "tree": "chain:3", "millions": 0.5, "length": 2.0}]
    environment = dict.fromkeys(("target", "dtype", "cpu", "torch", "transformers", "commit", "command"), "x")
    page = render_page({**content, "environment": {**environment, "max_new_tokens": 8, "cpu_flags": []}})
    assert "| mtp, chain:3 | 2.00 | 4.00 | 3.00 | 5.3 | 3.00 | 1.50 | 2/2 |" in page
    assert "llama.cpp did not run: it is not here" in page
