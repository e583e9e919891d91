"""Options that are refused before anything is loaded: NaN and infinity, and two files whose results have one name."""

from pathlib import Path

import pytest

from draftsmith.scripts.benchmark import BenchmarkArguments
from draftsmith.scripts.chat.arguments import GenerateArguments
from draftsmith.scripts.serve import ServeArguments


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_numbers_that_are_none(value: float, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["Hi"]}\n')
    with pytest.raises(ValueError, match="got --temperature"):
        GenerateArguments(target="t", temperature=value)
    with pytest.raises(ValueError, match="got --temperature"):
        BenchmarkArguments(target="t", prompts=[str(prompts)], temperature=[value])
    with pytest.raises(ValueError, match="got --minutes"):
        BenchmarkArguments(target="t", prompts=[str(prompts)], minutes=value)
    with pytest.raises(ValueError, match="got --drain_seconds"):
        ServeArguments(target="t", drain_seconds=value)


def test_results_of_two_files_with_one_name(tmp_path: Path) -> None:
    files = [tmp_path / folder / "q.jsonl" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text('{"turns": ["Hi"]}\n')
    options = {"target": "t", "prompts": [*map(str, files)]}
    BenchmarkArguments(**options)
    with pytest.raises(ValueError, match="two --prompts called q"):
        BenchmarkArguments(**options, format="speculators", results=str(tmp_path / "out"))
