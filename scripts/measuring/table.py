"""A benchmark's numbers and its tables, for the terminal and as Markdown.

Acceptance length: see `draftsmith.scripts.measuring.report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from draftsmith.inference.request.model_settings import describe_model_settings
from draftsmith.inference.text_difference import Difference

LABEL_WIDTH = 24  # of the first column, where it has to be folded
BORDER = 3  # of a column: a line and two spaces
CURES = ("--dtype float32",)  # options of the programs that measure
POSITIONS = (128, 256, 512, 1024, 2048, 4096)  # new tokens up to which acceptance is told
STEP_PARTS = ("step", "draft", "verify", "accept", "commit", "other")
T = TypeVar("T")


@dataclass
class Row:
    """One contender's numbers; None = the number does not exist.

    Attributes:
        warm_up_seconds: duration of the warm-up, compiling included.
        tokens_per_second: new tokens of all rows / seconds of the whole calls, all prompts together; the median of the
            repeats.
        over_transformers, over_plain: ratio of tokens/s to transformers' eager `generate`, and to this library's
            fastest plain decoding: the median over batches and repeats; the former with its quartiles.
        acceptance_length, acceptance_by_depth, accepted_histogram, nodes_per_step: per row.
        acceptance_by_position: acceptance lengths of the steps that begin up to each of `POSITIONS`.
        rows_per_step: mean number of rows that have not ended in a verify pass.
        step_milliseconds: of a verify step of the whole batch, prefill excluded: draft (the drafter, and the tree that
            grows), verify (the target's forward), accept, commit, other (the rest); `step` is their sum.
        prompt_milliseconds: to read a batch's prompts, the drafter's reading included.
        overhead_share: the share of a step that neither drafts nor verifies.
        host_syncs_per_step: how often the host waited to read a tensor (see `GenerationStats.num_host_syncs`).
        num_identical: rows whose text equals the reference's text of the prompt by itself, in every repeat.
        differences: of the other rows: the prompt's id, and where its text differs.
        repeated_4grams: the share of the text's 4-grams that occurred earlier in the text. Looping text helps drafters.
    """

    name: str
    tree: str = ""
    problem: str = ""
    warm_up_seconds: float = 0.0
    num_new_tokens: int = 0
    tokens_per_second: float = 0.0
    tokens_per_second_range: tuple[float, float] = (0.0, 0.0)
    over_transformers: float | None = None
    over_transformers_quartiles: tuple[float, float] | None = None
    over_plain: float | None = None
    acceptance_length: float = 1.0
    acceptance_by_depth: list[float] = field(default_factory=list)
    acceptance_by_position: list[float] = field(default_factory=list)
    accepted_histogram: list[int] = field(default_factory=list)
    nodes_per_step: float | None = None
    rows_per_step: float | None = None
    step_milliseconds: dict[str, float] | None = None
    prompt_milliseconds: float | None = None
    overhead_share: float | None = None
    host_syncs_per_step: float | None = None
    reference: str | None = None
    num_identical: int | None = None
    num_compared: int = 0
    differences: list[tuple[str, Difference]] = field(default_factory=list)
    repeated_4grams: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.name}, {self.tree}" if self.tree else self.name

    @property
    def faults(self) -> list[tuple[str, Difference]]:
        """The differences that are no near-ties."""
        return [each for each in self.differences if not each[1].is_near_tie]


@dataclass
class Grid:
    """A table before it is drawn. The first column is text, the others are numbers. faults: notes on what is wrong."""

    title: str
    columns: list[str]
    cells: list[list[str]]
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, title: str, columns: Mapping[str, Callable[[T], str]], rows: Iterable[T], notes: list[str]) -> Grid:
        """A line for each of the rows; columns: a header -> the text of a row."""
        return cls(title, list(columns), [[show(row) for show in columns.values()] for row in rows], notes)

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
        for fault in self.faults:
            console.print(fault, markup=False, highlight=False, style="red")

    def _least_width(self, place: int) -> int:
        """Of a column whose numbers, and whose header's words, are in one piece."""
        return max(map(cell_len, [*self.columns[place].split(), *(line[place] for line in self.cells)]))

    def to_markdown(self) -> str:
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"**{self.title}**", table, *self.notes, *self.faults]) + "\n"


def make_grids(rows: Sequence[Row], environment: dict[str, Any]) -> list[Grid]:
    """The table of speeds and texts, and the table of a step's parts."""
    grids = [_speed_grid(rows, environment), _step_grid(rows, environment)]
    return [grid for grid in grids if grid.cells]


def format_number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def _speed_grid(rows: Sequence[Row], environment: dict[str, Any]) -> Grid:
    columns: dict[str, Callable[[Row], str]] = {
        "decoding": lambda row: row.label,
        "tokens/s (min–max)": lambda row: "{:.1f} ({:.1f}–{:.1f})".format(
            row.tokens_per_second, *row.tokens_per_second_range
        ),
        "× generate": lambda row: format_number(row.over_transformers),
        "× fastest plain": lambda row: format_number(row.over_plain),
        "acceptance length": lambda row: format_number(row.acceptance_length),
        "same text": describe_texts,
        "repeated 4-grams": lambda row: f"{row.repeated_4grams:.0%}",
    }
    notes = [f"{row.label} did not run: {row.problem}" for row in rows if row.problem]
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
    grid = Grid.of(title, columns, (row for row in rows if not row.problem), [*notes, *note_near_ties(rows), legend])
    grid.faults = note_faults(rows)
    return grid


def describe_texts(row: Row) -> str:
    """How many of its texts are the reference's, and why the others are not."""
    if row.reference == row.name:
        return "reference"
    if row.num_identical is None:
        return "–"
    counts = {"near-tie": len(row.differences) - len(row.faults), "fault": len(row.faults)}
    told = [f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count]
    return ", ".join([f"{row.num_identical}/{row.num_compared}", *told])


def note_near_ties(rows: Sequence[Row]) -> list[str]:
    """One note for all texts that differ from the reference where rounding decides, with the widest of them."""
    ties = [(row, found) for row in rows for _, found in row.differences if found.is_near_tie]
    if not ties:
        return []
    row, widest = max(ties, key=lambda tie: abs(tie[1].gap or 0.0) / tie[1].resolution)
    return [f"near-ties: texts that differ from {row.reference} by rounding. The widest: {widest.explain(CURES)}"]


def note_faults(rows: Sequence[Row]) -> list[str]:
    """Notes on texts that differ from the reference, and rounding does not explain it."""
    return [
        f"{row.label}: {len(row.faults)} of {row.num_compared} texts are not those of {row.reference}. The first: "
        f"prompt {row.faults[0][0]}, token {row.faults[0][1].place + 1}. {row.faults[0][1].explain()}"
        for row in rows
        if row.faults
    ]


def _step_grid(rows: Sequence[Row], environment: dict[str, Any]) -> Grid:
    is_batch = environment["batch"] > 1

    def show_part(part: str) -> Callable[[Row], str]:
        return lambda row: format_number((row.step_milliseconds or {}).get(part))

    columns: dict[str, Callable[[Row], str]] = {
        "ms per verify step": lambda row: row.label,
        **{part: show_part(part) for part in STEP_PARTS},
        "prompt": lambda row: format_number(row.prompt_milliseconds, ".1f"),
        "overhead": lambda row: format_number(row.overhead_share, ".0%"),
        "nodes": lambda row: format_number(row.nodes_per_step, ".0f"),
        **({"rows": lambda row: format_number(row.rows_per_step, ".1f")} if is_batch else {}),
        "accepted at depth 1, 2, ...": lambda row: " ".join(f"{share:.2f}" for share in row.acceptance_by_depth) or "–",
    }
    notes = [
        "draft: the drafter and its tree; verify: the target's forward; overhead: all but these two; prompt: reading "
        "the prompts, once per text"
    ]
    if is_batch:
        notes.append("times are per batch, nodes and acceptance per row; rows: rows that have not ended")
    for row in rows:
        if len(row.acceptance_by_position) > 1 and row.acceptance_length > 1:
            parts = zip(POSITIONS, row.acceptance_by_position, strict=False)
            told = ", ".join(f"{length:.2f} to {end}" for end, length in parts)
            notes.append(f"{row.label}: acceptance length by tokens of the text so far: {told}")
    timed = (row for row in rows if row.step_milliseconds is not None)
    return Grid.of("Where a verify step's time goes", columns, timed, notes)
