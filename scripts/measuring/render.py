"""A benchmark's rows as tables, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from draftsmith.inference.request.model_settings import describe_model_settings
from draftsmith.scripts.measuring.rows import Row

LABEL_WIDTH = 24  # of the first column, where it has to be folded
BORDER = 3  # of a column: a line and two spaces
STEP_PARTS = ("step", "draft", "grow", "verify", "accept", "commit", "other")


@dataclass
class Grid:
    """A table before it is drawn. The first column is text, the others are numbers."""

    title: str
    columns: list[str]
    cells: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def print(self, console: Console) -> None:
        """In a narrow terminal as several tables, so that no number is broken into pieces."""
        widths = [self._least_width(place) for place in range(len(self.columns))]
        label_width = min(max((cell_len(line[0]) for line in self.cells), default=0), LABEL_WIDTH)
        parts: list[list[int]] = [[]]
        for place in range(1, len(self.columns)):
            needed = 1 + sum(width + BORDER for width in [label_width, *(widths[one] for one in [*parts[-1], place])])
            if parts[-1] and needed > console.width:
                parts.append([])
            parts[-1].append(place)
        for part in parts:
            title = self.title if part is parts[0] else None
            table = Table(title=title, title_justify="left", title_style="bold")
            table.add_column(self.columns[0], overflow="fold")
            for place in part:
                table.add_column(self.columns[place], justify="right", overflow="fold", min_width=widths[place])
            for line in self.cells:
                table.add_row(line[0], *(line[place] for place in part))
            console.print(table)
        for note in self.notes:
            console.print(note, markup=False, highlight=False, style="dim")

    def _least_width(self, place: int) -> int:
        """Of a column whose numbers, and whose header's words, are in one piece."""
        return max(map(cell_len, [*self.columns[place].split(), *(line[place] for line in self.cells)]))

    def to_markdown(self) -> str:
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"**{self.title}**", table, *self.notes]) + "\n"


def make_grids(rows: Sequence[Row], environment: dict[str, Any]) -> list[Grid]:
    """The table of speeds and texts, and the table of a step's parts."""
    grids = [_speed_grid(rows, environment), _step_grid(rows, environment)]
    return [grid for grid in grids if grid.cells]


def format_number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def _speed_grid(rows: Sequence[Row], environment: dict[str, Any]) -> Grid:
    columns = [
        "decoding",
        "tokens/s (min–max)",
        "× generate",
        "× fastest plain",
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
                format_number(row.over_transformers),
                format_number(row.over_plain),
                format_number(row.acceptance_length),
                "reference" if row.reference == row.name else same,
                f"{row.repeated_4grams:.0%}",
            ]
        )
    if again := environment.get("num_prompts_again"):
        notes.append(f"the last batch was filled up with {again} of the first prompts; they count like all others")
    source = f" of {Path(environment['prompts']).name}" if environment.get("prompts") else ""
    title = (
        f"{environment['target']}, {environment['dtype']}, T = {environment['temperature']:g}, "
        f"{environment['num_prompts']} prompts{source} × {environment['max_new_tokens']} tokens, "
        f"{environment['repeats']} repeats, batch {environment['batch']}, "
        f"{environment['gpu'] or environment['cpu']}, {environment['threads']} threads"
    )
    if own := environment.get("generation_config"):
        notes.append(describe_model_settings(own))
    legend = (
        "× generate: speed over transformers' eager generate; × fastest plain: speed over this library's fastest "
        "decoding without drafts"
    )
    return Grid(title, columns, cells, [*notes, *text_notes(rows), legend])


def text_notes(rows: Sequence[Row]) -> list[str]:
    """Notes on differing texts: the gap of the two logits shows whether a difference is a near-tie or a bug."""
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


def _step_grid(rows: Sequence[Row], environment: dict[str, Any]) -> Grid:
    is_batch = environment["batch"] > 1
    cells = [
        [
            row.label,
            *(f"{row.step_milliseconds[part]:.2f}" for part in STEP_PARTS),
            format_number(row.prompt_milliseconds, ".1f"),
            format_number(row.overhead_share, ".0%"),
            format_number(row.roofline_share, ".0%"),
            format_number(row.nodes_per_step, ".0f"),
            *([format_number(row.rows_per_step, ".1f")] if is_batch else []),
            " ".join(f"{share:.2f}" for share in row.acceptance_by_depth) or "–",
        ]
        for row in rows
        if row.step_milliseconds is not None
    ]
    notes = [
        "draft: inside the drafter; grow: the tree and the noise; verify: the target's forward; "
        "overhead: all but draft and verify; prompt: reading the prompts, once per text"
    ]
    if any(row.roofline_share is not None for row in rows):
        notes.append(
            "of the roofline: shortest time in which this machine can read and multiply the weights / time of the step "
            f"({environment['bandwidth_gb_s']:.1f} GB/s, {environment['matmul_gflop_s']:.0f} GFLOP/s)"
        )
    if is_batch:
        notes.append("times are per batch, nodes and acceptance per row; rows: rows that have not ended")
    columns = [
        "ms per verify step",
        *STEP_PARTS,
        "prompt",
        "overhead",
        "of the roofline",
        "nodes",
        *(["rows"] if is_batch else []),
    ]
    columns.append("accepted at depth 1, 2, ...")
    return Grid("Where a verify step's time goes", columns, cells, notes)
