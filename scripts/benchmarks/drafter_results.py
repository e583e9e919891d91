"""What a file of the table of drafters says, all portions together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference import GenerationStats
from scripts.benchmarks.drafter_portions import Report, base_name
from scripts.benchmarks.measure import PLAIN
from scripts.benchmarks.render import format_number
from scripts.benchmarks.report import compare_speeds
from scripts.benchmarks.rows import Row
from scripts.benchmarks.texts import Difference

NONE = "–"
Combination = tuple[str, float]  # fingerprint of the prompts, temperature


@dataclass(frozen=True)
class Cell:
    """A contender on one file of prompts at one temperature. over_plain: median and quartiles of the speed beside plain
    decoding, compiled for contenders that are."""

    row: Row
    over_plain: tuple[float, tuple[float, float]] | None


class Results:
    """All portions of a file together.

    Attributes:
        titles: of the combinations, greedy ones first.
        drafters: what is known of each; best first.
        others: contenders that are no drafters of ours.
        cells: by contender and combination; baselines from the first report of a combination.
    """

    def __init__(self, reports: Sequence[Report]) -> None:
        self.reports = list(reports)
        self.cells: dict[str, dict[Combination, Cell]] = {}
        self.trees: dict[str, str] = {}
        self.drafters: dict[str, dict[str, Any]] = {}
        combinations: dict[Combination, None] = {}
        paths: dict[str, str] = {}  # of prompts, by fingerprint
        for report in reports:
            environment = report["environment"]
            where = (environment["prompts_fingerprint"], environment["temperature"])
            paths.setdefault(where[0], environment["prompts"])
            combinations[where] = None
            self.drafters |= environment["drafters"]
            for content in report["rows"]:
                row = _read_row(content)
                name = base_name(row.name) if base_name(row.name) in environment["drafters"] else row.name
                self.trees[name] = row.tree
                self.cells.setdefault(name, {}).setdefault(where, Cell(row, _compare_with_plain(report, row)))
        ordered = sorted(combinations, key=lambda where: where[1])  # stable: files stay in their order
        self.titles = {where: f"{Path(paths[where[0]]).stem}, T={where[1]:g}" for where in ordered}
        names = sorted(self.drafters, key=lambda name: -(self.mean_length(name) or 0.0))
        self.drafters = {name: self.drafters[name] for name in names}
        self.others = [name for name in self.cells if name not in self.drafters]

    @property
    def lowest_temperature(self) -> float:
        return min(temperature for _, temperature in self.titles)

    def mean_length(self, name: str) -> float | None:
        """Mean acceptance length of the prompt files at the lowest temperature; None unless all were measured."""
        rows = self._coldest_rows(name)
        is_whole = len(rows) == sum(temperature == self.lowest_temperature for _, temperature in self.titles)
        return statistics.fmean(row.acceptance_length for row in rows) if is_whole else None

    def count_accepted(self, name: str) -> GenerationStats:
        """Steps of all prompt files at the lowest temperature together."""
        total = GenerationStats()
        for row in self._coldest_rows(name):
            total += GenerationStats(accepted_histogram=row.accepted_histogram)
        return total

    def _coldest_rows(self, name: str) -> list[Row]:
        cells = self.cells.get(name, {})
        return [cell.row for (_, t), cell in cells.items() if t == self.lowest_temperature and not cell.row.problem]

    def show(self, name: str, text: Callable[[Cell], str]) -> list[str]:
        """A contender's cells of all combinations."""
        own = self.cells[name]
        return [text(own[where]) if where in own and not own[where].row.problem else NONE for where in self.titles]

    def show_mean(self, name: str, where: Sequence[Combination]) -> str:
        """Of the acceptance lengths, and of the speeds beside `generate` (each the median of a file)."""
        own = self.cells[name]
        rows = [own[one].row for one in where if one in own and not own[one].row.problem]
        if len(rows) < len(where):
            return NONE
        speeds = [row.over_transformers for row in rows if row.over_transformers is not None]
        length = statistics.fmean(row.acceptance_length for row in rows)
        return f"{length:.2f}, {format_number(statistics.fmean(speeds) if speeds else None)}×"


def _read_row(content: dict[str, Any]) -> Row:
    return Row(**{**content, "differences": [Difference(**one) for one in content["differences"]]})


def _compare_with_plain(report: Report, row: Row) -> tuple[float, tuple[float, float]] | None:
    mode = ", compiled" if row.name.endswith(", compiled") else ""
    runs = [report["runs"].get(label) for label in (row.label, f"{PLAIN}{mode}")]
    if not all(runs):
        return None
    return compare_speeds(*([run["tokens"] / run["seconds"] for repeat in one or [] for run in repeat] for one in runs))
