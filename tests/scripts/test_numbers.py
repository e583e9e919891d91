"""Options that are numbers refuse NaN and infinity before anything is loaded."""

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
