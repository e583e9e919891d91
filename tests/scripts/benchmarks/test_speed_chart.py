"""scripts/benchmarks/speed_chart.py: the committed charts show the committed numbers."""

from __future__ import annotations

import json

import pytest

from draftsmith.scripts.benchmarks.speed_chart import choose_rows, draw, mean_of
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.mark.parametrize("name", ["speed"])
def test_the_committed_chart_is_of_the_committed_numbers(name: str) -> None:
    reports = json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())["reports"]
    greedy = [report for report in reports if report["environment"]["temperature"] == 0]
    assert (DOCS / "images" / f"{name}.svg").read_text() == draw(mean_of(greedy)), "run speed_chart.py again"


def row(name: str, speed: float, tree: str = "", problem: str = "") -> dict[str, object]:
    quartiles = [speed - 0.1, speed + 0.1]
    numbers = {"over_transformers": speed, "over_transformers_quartiles": quartiles, "acceptance_length": 1.0}
    return {"name": name, "tree": tree, "problem": problem} | numbers


def test_every_baseline_and_the_best_tree_of_each_drafter() -> None:
    rows = [
        row("transformers generate", 1.0),
        row("plain decoding", 0.9),
        row("plain decoding, compiled", 2.5),
        row("n-gram drafter", 1.5, "chain"),
        row("mtp", 2.0, "chain"),
        row("mtp, compiled", 3.0, "dynamic"),
        row("mtp, compiled", 9.0, "auto", problem="did not run"),
    ]
    chosen = [(kind, one["name"], one["tree"]) for kind, one in choose_rows(rows, ["mtp"])]
    assert chosen == [
        ("plain", "plain decoding", ""),
        ("plain", "transformers generate", ""),
        ("plain", "plain decoding, compiled", ""),
        ("untrained", "n-gram drafter", "chain"),
        ("heads", "mtp, compiled", "dynamic"),
    ]


def test_several_reports_are_averaged() -> None:
    reports = [
        {"environment": {"num_prompts": number}, "rows": [row("mtp", speed)]} for number, speed in ((3, 2.0), (4, 4.0))
    ]
    mean = mean_of(reports)
    assert mean["environment"]["num_prompts"] == 7
    assert mean["rows"][0]["over_transformers"] == 3.0
