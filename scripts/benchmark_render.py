"""A benchmark's rows as tables (for the terminal and as Markdown) and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark_report import Row
from rich.console import Console
from rich.table import Table

STEP_PARTS = ("step", "draft", "grow", "verify", "accept", "commit", "other")


@dataclass
class Grid:
    """A table before it is drawn. The first column is text, the others are numbers."""

    title: str
    columns: list[str]
    cells: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def print(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left", title_style="bold")
        for place, column in enumerate(self.columns):
            table.add_column(column, justify="left" if place == 0 else "right", overflow="fold")
        for line in self.cells:
            table.add_row(*line)
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False, highlight=False, style="dim")

    def to_markdown(self) -> str:
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"**{self.title}**", table, *self.notes]) + "\n"


def make_grids(rows: Sequence[Row], environment: dict[str, Any]) -> list[Grid]:
    """Speed and text; then where a step's time goes."""
    return [_speed_grid(rows, environment), _step_grid(rows)]


def _number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def _speed_grid(rows: Sequence[Row], environment: dict[str, Any]) -> Grid:
    columns = [
        "decoding",
        "tokens/s (min–max)",
        "× generate",
        "× plain",
        "acceptance length",
        "same text",
        "repeated 4-grams",
    ]
    cells, notes = [], []
    for row in rows:
        if row.problem:
            notes.append(f"{row.label} did not run: {row.problem}")
            continue
        low, high = row.tokens_per_second_range
        same = "–" if row.num_identical is None else f"{row.num_identical}/{row.num_compared}"
        cells.append(
            [
                row.label,
                f"{row.tokens_per_second:.1f} ({low:.1f}–{high:.1f})",
                _number(row.over_transformers),
                _number(row.over_plain),
                _number(row.acceptance_length),
                "reference" if row.reference == row.name else same,
                f"{row.repeated_4grams:.0%}",
            ]
        )
    title = (
        f"{environment['target']}, {environment['dtype']}, T = {environment['temperature']:g}, "
        f"{environment['num_prompts']} prompts × {environment['max_new_tokens']} tokens, "
        f"{environment['repeats']} repeats, batch 1, "
        f"{environment['gpu'] or environment['cpu']}, {environment['threads']} threads"
    )
    return Grid(title, columns, cells, notes + _text_notes(rows))


def _text_notes(rows: Sequence[Row]) -> list[str]:
    """What the differing texts are worth: nobody should take a near-tie for a bug, or a bug for a near-tie."""
    notes = []
    for row in rows:
        if not row.differences:
            continue
        note = f"{row.label}: {len(row.differences)} of {row.num_compared} texts differ from {row.reference}"
        gaps = [(abs(d.gap), d.resolution) for d in row.differences if d.gap is not None and d.resolution is not None]
        if gaps:
            gap, resolution = max(gaps)
            note += f"; the target's two logits are at most {gap:.2g} apart there (its dtype resolves {resolution:.2g})"
        notes.append(note)
    return notes


def _step_grid(rows: Sequence[Row]) -> Grid:
    cells = [
        [
            row.label,
            *(f"{row.step_milliseconds[part]:.2f}" for part in STEP_PARTS),
            _number(row.overhead_share, ".0%"),
            _number(row.nodes_per_step, ".0f"),
            " ".join(f"{share:.2f}" for share in row.acceptance_by_depth) or "–",
        ]
        for row in rows
        if row.step_milliseconds is not None
    ]
    notes = [
        "draft: inside the drafter; grow: the tree and the noise; verify: the target's forward; "
        "overhead: all but draft and verify"
    ]
    columns = ["ms per verify step", *STEP_PARTS, "overhead", "nodes", "accepted at depth 1, 2, ..."]
    return Grid("Where a verify step's time goes", columns, cells, notes)


def draw_plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Bars of the speed against transformers' `generate`, and of the acceptance length, as a PNG."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or install draftsmith[bench]") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if not row.problem and row.over_transformers is not None]
    places = range(len(shown))
    figure, (speed, acceptance) = plt.subplots(
        1, 2, sharey=True, figsize=(11, 1.8 + 0.42 * len(shown)), layout="constrained"
    )
    speeds = [row.over_transformers or 0.0 for row in shown]
    quartiles = [row.over_transformers_quartiles or (ratio, ratio) for row, ratio in zip(shown, speeds, strict=True)]
    spread = [[max(0.0, s - q[0]) for s, q in zip(speeds, quartiles, strict=True)],
              [max(0.0, q[1] - s) for s, q in zip(speeds, quartiles, strict=True)]]  # fmt: skip
    speed.barh(places, speeds, xerr=spread, color="#4878a8", ecolor="#8a8a8a", capsize=2)
    speed.axvline(1.0, color="black", linewidth=0.8)
    speed.set_xlabel("speed against transformers generate (median, quartiles)")
    lengths = [row.acceptance_length for row in shown]
    acceptance.barh(places, lengths, color="#d98c3f")
    acceptance.axvline(1.0, color="black", linewidth=0.8)
    acceptance.set_xlabel("acceptance length (tokens per verify step)")
    for axis, values, tops in ((speed, speeds, [q[1] for q in quartiles]), (acceptance, lengths, lengths)):
        for place, value, top in zip(places, values, tops, strict=True):
            axis.text(max(value, top), place, f" {value:.2f}", va="center", fontsize=9)
        axis.set_xlim(0, 1.15 * max(1.0, *tops))
        axis.spines[["top", "right"]].set_visible(False)
    speed.set_yticks(places, [row.label for row in shown])
    speed.invert_yaxis()
    figure.suptitle(title, fontsize=9, wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    figure.savefig(scratch, format="png", dpi=130)
    plt.close(figure)
    scratch.replace(path)
