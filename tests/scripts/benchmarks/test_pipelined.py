"""pipelined.py on a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.scripts.benchmarks import pipelined


def test_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    words = [
        "--shape",
        "tiny",
        "--group_size",
        "2",
        "--num_prompts",
        "2",
        "--max_new_tokens",
        "8",
        "--dtype",
        "float32",
    ]
    pipelined.main([*words, "--output", str(output)])
    for run in json.loads(output.read_text())["runs"]:
        assert run["equal_texts"] == run["num_texts"] == 2
        assert 1 <= run["passes_per_token"] <= 2
        assert len(run["seconds_per_token"]["pipelined"]) == 2
    assert "computed" in capsys.readouterr().out


def test_one_of_target_and_shape() -> None:
    with pytest.raises(SystemExit, match="give --target or --shape"):
        pipelined.main([])
