"""Compares batch sizes: the speed of every contender at each size, and the fastest tree of each drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.scripts.measuring.measure import PLAIN, TRANSFORMERS
from draftsmith.scripts.measuring.table import Grid, Row, format_number

MARK = "★"


def make_batch_grid(rows: Mapping[int, Sequence[Row]], environment: dict[str, Any]) -> Grid:
    """A line for each contender and tree, a column for each batch size. Notes name the fastest tree at each batch size
    for contenders with several trees.

    Args:
        rows: by batch size, for the same target, prompts and temperature.
        environment: that of any of the reports.
    """
    cells: dict[str, dict[int, Row]] = {}
    for batch, own in rows.items():
        for row in own:
            cells.setdefault(row.label, {})[batch] = row
    chosen = choose_trees(rows)
    best = {(batch, row.label) for trees in chosen.values() for batch, row in trees.items()}
    lines = [
        [label, *(_show(own.get(batch), is_best=(batch, label) in best) for batch in rows)]
        for label, own in cells.items()
        if any(not row.problem for row in own.values())
    ]
    notes = [
        "tokens/s of all rows together (in brackets: × generate, × fastest plain, at the same batch size)"
        + (f"; {MARK} fastest tree of its drafter" if chosen else "")
    ]
    if chosen:
        notes.append("below, in brackets: speed over the fastest decoding without drafts at the same batch size")
    notes += [_describe_choice(name, trees, rows) for name, trees in chosen.items()]
    title = (
        f"{environment['target']}, {environment['dtype']}, T = {environment['temperature']:g}: "
        f"batches of {', '.join(map(str, rows))}"
    )
    return Grid(title, ["decoding", *(f"batch {batch}" for batch in rows)], lines, notes)


def choose_trees(rows: Mapping[int, Sequence[Row]]) -> dict[str, dict[int, Row]]:
    """The fastest row at each batch size, for each contender with several trees."""
    chosen: dict[str, dict[int, Row]] = {}
    for batch, own in rows.items():
        for name in dict.fromkeys(row.name for row in own if row.tree):
            trees = [row for row in own if row.name == name and not row.problem]
            if len(trees) > 1:
                chosen.setdefault(name, {})[batch] = max(trees, key=lambda row: row.tokens_per_second)
    return chosen


def _describe_choice(name: str, trees: Mapping[int, Row], rows: Mapping[int, Sequence[Row]]) -> str:
    parts = []
    for batch, row in trees.items():
        undrafted = [one for one in rows[batch] if one.name.startswith((TRANSFORMERS, PLAIN)) and not one.problem]
        ratio = row.tokens_per_second / max(one.tokens_per_second for one in undrafted)
        parts.append(f"{batch} -> {row.tree} ({ratio:.2f})")
    return f"{name}, fastest tree by batch size: {', '.join(parts)}"


def _show(row: Row | None, *, is_best: bool) -> str:
    if row is None or row.problem:
        return "–"
    ratios = f"{format_number(row.over_transformers)}, {format_number(row.over_plain)}"
    return f"{row.tokens_per_second:.1f} ({ratios}){f' {MARK}' if is_best else ''}"
