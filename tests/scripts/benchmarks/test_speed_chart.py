"""scripts/benchmarks/speed_chart.py: the committed charts show the committed numbers."""

from __future__ import annotations

import json

import pytest

from draftsmith.scripts.benchmarks.speed_chart import draw, mean_of
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.mark.parametrize("name", ["speed"])
def test_the_committed_chart_is_of_the_committed_numbers(name: str) -> None:
    reports = json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())["reports"]
    greedy = [report for report in reports if report["environment"]["temperature"] == 0]
    assert (DOCS / "images" / f"{name}.svg").read_text() == draw(mean_of(greedy)), "run speed_chart.py again"
