"""The table of acceptance lengths by the temperature of greedy scores."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import CHAT_TARGET, REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import score_temperature

from inference import drafter

HEADS = REPOSITORY / "examples" / "heads" / "medusa"
PROMPTS = REPOSITORY / "examples" / "prompts.jsonl"
OPTIONS = ["--target", str(CHAT_TARGET), "--heads", str(HEADS), "--prompts", str(PROMPTS), "--num_prompts", "1"]


def test_the_table_has_a_column_for_each_temperature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = drafter.GREEDY_TEMPERATURE
    output = tmp_path / "new" / "table.md"
    words = ["--tree", "dynamic:2,2,4", "chain", "--temperature", "0.7", "1", "--max_new_tokens", "24"]
    assert score_temperature.main([*OPTIONS, *words, "--markdown", str(output)]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines == output.read_text().strip().splitlines()
    assert lines[0] == "| heads | tree | 0.7 | 1 |"
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert [row[1] for row in rows] == ["dynamic:2,2,4", "chain"]
    assert rows[1][2] == rows[1][3], "a chain is the same at every temperature"
    assert float(rows[1][2]) > 1
    assert usual == drafter.GREEDY_TEMPERATURE


@pytest.mark.parametrize(("option", "value"), [("--temperature", "0"), ("--max_new_tokens", "1")])
def test_options_that_cannot_work_are_refused(option: str, value: str) -> None:
    with pytest.raises(SystemExit, match=f"score_temperature.py: got {option}"):
        score_temperature.main([*OPTIONS, option, value])
