"""`scripts/benchmarks/overfit.py`: every kind of heads can learn one conversation by heart."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.conftest import REPOSITORY


@pytest.fixture
def overfit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(REPOSITORY)
    return importlib.import_module("scripts.benchmarks.overfit")


def table(output: str) -> dict[str, tuple[float, int]]:
    """Kind -> acceptance length, and the most that is possible."""
    return {line.split()[0]: (float(line.split()[2]), int(line.split()[3])) for line in output.splitlines()[1:]}


def test_the_quickest_kinds(overfit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert overfit.main(["--kinds", "medusa", "hydra", "--num_tokens", "40"]) == 0
    found = table(capsys.readouterr().out)
    assert found.keys() == {"medusa", "hydra"}
    assert found["medusa"][1] == 6
    assert all(length > 0.9 * longest for length, longest in found.values())


def test_a_kind_that_does_not_get_there_is_named(overfit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert overfit.main(["--kinds", "medusa", "--num_tokens", "20", "--max_steps", "1"]) == 1
    captured = capsys.readouterr()
    assert table(captured.out)["medusa"][0] < 5.4
    assert "below 90% of the most that is possible: medusa" in captured.err
    with pytest.raises(SystemExit, match="got --kinds medsua; known kinds: block, eagle"):
        overfit.main(["--kinds", "medsua"])
    with pytest.raises(SystemExit, match="got --max_steps 0: give more than 0"):
        overfit.main(["--max_steps", "0"])
    with pytest.raises(SystemExit, match=r"overfit\.py: .*nowhere"):
        overfit.main(["--target", "nowhere"])


@pytest.mark.slow
def test_every_kind(overfit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert overfit.main([]) == 0
    assert all(length > 0.9 * longest for length, longest in table(capsys.readouterr().out).values())
