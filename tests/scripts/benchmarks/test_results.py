"""results.py: every decoded prompt is kept, the same command goes on, and what is made of the numbers."""

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
from draftsmith.scripts.benchmarks.results_chart import draw
from draftsmith.scripts.benchmarks.results_summary import make_content, render_page
from draftsmith.scripts.measuring.contenders import NGRAMS
from draftsmith.scripts.measuring.measure import PLAIN, TRANSFORMERS
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def target(small_chat: str) -> Target:
    return Target(AutoModelForCausalLM.from_pretrained(small_chat, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("heads") / "eagle3"
    create_heads("eagle3", target).save_pretrained(folder)
    return folder


@pytest.fixture
def options(small_chat: str, target: Target, heads: Path, tmp_path: Path) -> dict[str, Any]:
    files = tmp_path / "prompts"
    files.mkdir()
    for name in ("a", "b"):
        lines = [json.dumps({"id": f"{name}{number}", "turns": [f"Count to {number}"]}) for number in range(3)]
        (files / f"{name}.jsonl").write_text("\n".join(lines))
    write_llama(tmp_path / "small.Q4_1.gguf", target)
    found: dict[str, Any] = {"target": small_chat, "prompts": [str(files)], "heads": [str(heads)]}
    found |= {"tree": ["chain:2"], "gguf": str(tmp_path / "small.Q4_1.gguf")}
    numbers = {"limit": 1, "max_new_tokens": 6}
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
    file.write_text(file.read_text() + '{"key": [1, 0.0, ')
    before = file.read_text().splitlines()[:4]
    content = results.run(ResultsArguments(**options))
    lines = file.read_text().splitlines()
    assert lines[:4] == before, "the conditions, and three cells"
    keys = [json.loads(line)["key"] for line in lines[1:]]
    assert [key[1:3] for key in keys] == [[0.0, "a"], [1.0, "a"], [0.0, "b"], [1.0, "b"]]

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
    assert "plain decoding, packed" in (tmp_path / "out.svg").read_text()

    assert results.run(ResultsArguments(**options | {"limit": 2, "minutes": 1e-9})) == content, "no time for more"
    more = results.run(ResultsArguments(**options | {"limit": 2}))
    assert [one["num_prompts"] for one in more["reports"]] == [2, 2, 4] * 2
    assert file.read_text().splitlines()[: len(lines)] == lines
    both = results.run(ResultsArguments(**options | {"threads": [1, 2]}))
    assert [(one["threads"], one["num_prompts"]) for one in both["reports"]][2::3] == [(1, 4)] * 2 + [(2, 2)] * 2
    with pytest.raises(ValueError, match="max_new_tokens 6 there, 7 now"):
        results.run(ResultsArguments(**options | {"max_new_tokens": 7}))


def make_cells() -> list[dict[str, Any]]:
    """Two prompts; the drafter is twice and four times as fast as `generate`."""

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

    return [
        {"key": [1, 0.0, file, "0"], "problems": {"llama.cpp": "it is not here"}}
        | {"runs": [run(TRANSFORMERS, 4.0, 8), run(PLAIN, 2.0, 8), run("mtp", seconds, steps, "chain:3")]}
        for file, seconds, steps in (("a", 2.0, 4), ("b", 1.0, 2))
    ]


def test_the_numbers_that_follow_from_cells() -> None:
    content = make_content({"target": "t"}, make_cells())
    every = next(one for one in content["reports"] if one["prompts"] == "all")
    mtp = next(row for row in every["rows"] if row["name"] == "mtp")
    assert (mtp["over_transformers"], mtp["over_plain"]) == (3.0, 1.5)
    assert mtp["acceptance_length"] == 3.0
    assert mtp["tokens_per_second"] == pytest.approx(16 / 3)
    environment = dict.fromkeys(("target", "dtype", "cpu", "torch", "transformers", "commit", "command"), "x")
    page = render_page({**content, "environment": {**environment, "max_new_tokens": 8, "cpu_flags": []}})
    assert "| mtp, chain:3 | 2.00 | 4.00 | 3.00 | 5.3 | 3.00 | 1.50 | 2/2 |" in page
    assert "llama.cpp did not run: it is not here" in page


def test_the_committed_chart_is_of_the_committed_numbers() -> None:
    content = json.loads((REPOSITORY / "docs/benchmarks/smollm2.json").read_text())
    assert (REPOSITORY / "docs/images/smollm2.svg").read_text() == draw(content), "draw it again"
