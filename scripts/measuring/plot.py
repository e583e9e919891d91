"""A benchmark's rows as charts: speed, acceptance length and the parts of a step; speed over batch sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.scripts.measuring.table import Row

# The parts of a step in the order they happen, each with its colour.
PART_COLOURS = {
    "draft": "#d98c3f",
    "grow": "#eac08a",
    "verify": "#4878a8",
    "accept": "#6aa56a",
    "commit": "#a7cf9f",
    "other": "#b0b0b0",
}
SPEED_COLOUR, LENGTH_COLOUR = "#4878a8", "#d98c3f"


def draw_plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draws a PNG with bars: speed relative to transformers' `generate`, acceptance length, and the milliseconds of
    each part of a step. Rows that did not run are left out."""
    plt = load_pyplot()
    shown = [row for row in rows if not row.problem and row.over_transformers is not None]
    figure, (speed, acceptance, step) = plt.subplots(
        1, 3, sharey=True, figsize=(15, 2.4 + 0.42 * len(shown)), layout="constrained"
    )
    ratios = [row.over_transformers or 0.0 for row in shown]
    quartiles = [row.over_transformers_quartiles or (ratio, ratio) for row, ratio in zip(shown, ratios, strict=True)]
    _draw_bars(speed, ratios, SPEED_COLOUR, "speed against transformers generate (median, quartiles)", quartiles)
    lengths = [row.acceptance_length for row in shown]
    _draw_bars(acceptance, lengths, LENGTH_COLOUR, "acceptance length (tokens per verify step)")
    _draw_steps(step, shown)
    speed.set_yticks(range(len(shown)), [row.label for row in shown])
    speed.set_ylim(len(shown) - 0.4, -0.6)  # the first row on top
    figure.suptitle(title, fontsize=9, wrap=True)
    save_figure(figure, path)


def draw_batch_plot(path: Path, rows: Mapping[int, Sequence[Row]], title: str) -> None:
    """Draws speed relative to transformers' `generate` over the batch size: one line for each contender and tree, one
    colour for each contender."""
    plt = load_pyplot()
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for batch, row in ((batch, row) for batch, own in rows.items() for row in own):
        if row.over_transformers is not None:
            lines.setdefault((row.name, row.tree), {})[batch] = row.over_transformers
    names = list(dict.fromkeys(name for name, _ in lines))
    trees = list(dict.fromkeys(tree for _, tree in lines))
    colours = dict(zip(names, itertools.cycle(plt.get_cmap("tab20").colors), strict=False))
    marks = dict(zip(trees, itertools.cycle("os^vDPX*<>"), strict=False))
    figure, axis = plt.subplots(figsize=(11, 2.5 + 0.22 * max(12, len(lines))), layout="constrained")
    for (name, tree), speeds in lines.items():
        label = f"{name}, {tree}" if tree else name
        axis.plot(list(speeds), list(speeds.values()), marker=marks[tree], color=colours[name], label=label)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(rows), [str(batch) for batch in rows])
    axis.set_xlabel("batch size")
    axis.set_ylabel("speed against transformers generate, same batch size")
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9, wrap=True)
    save_figure(figure, path)


def _draw_bars(
    axis: Any,
    values: Sequence[float],
    colour: str,
    label: str,
    quartiles: Sequence[tuple[float, float]] | None = None,
) -> None:
    places = range(len(values))
    spread, tops = None, list(values)
    if quartiles is not None:
        tops = [max(value, high) for value, (_, high) in zip(values, quartiles, strict=True)]
        below = [max(0.0, value - low) for value, (low, _) in zip(values, quartiles, strict=True)]
        spread = [below, [top - value for top, value in zip(tops, values, strict=True)]]
    axis.barh(places, values, xerr=spread, color=colour, ecolor="#8a8a8a", capsize=2)
    axis.axvline(1.0, color="black", linewidth=0.8)
    _label_ends(axis, tops, [f"{value:.2f}" for value in values], least=1.0)
    axis.set_xlabel(label)


def _draw_steps(axis: Any, rows: Sequence[Row]) -> None:
    """Rows of transformers stay empty: its steps are not timed."""
    steps = [row.step_milliseconds or {} for row in rows]
    lefts = [0.0] * len(rows)
    for part, colour in PART_COLOURS.items():
        widths = [max(0.0, step.get(part, 0.0)) for step in steps]
        axis.barh(range(len(rows)), widths, left=lefts, color=colour, label=part)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    _label_ends(axis, lefts, [f"{step['step']:.1f}" if step else "not measured" for step in steps])
    axis.set_xlabel("milliseconds of a verify step")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PART_COLOURS), fontsize=8, frameon=False,
                columnspacing=1.0, handlelength=1.0)  # fmt: skip


def _label_ends(axis: Any, tops: Sequence[float], texts: Sequence[str], least: float = 0.0) -> None:
    """Writes a number after the end of each bar, and leaves room for it."""
    for place, (top, text) in enumerate(zip(tops, texts, strict=True)):
        # A white box, so that the line at 1 does not cross a number.
        axis.annotate(text, (top, place), (5, 0), textcoords="offset points", va="center", fontsize=9,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip
    axis.set_xlim(0, 1.18 * max(least, *tops, 1e-9))
    axis.spines[["top", "right"]].set_visible(False)


def load_pyplot() -> Any:
    """matplotlib.pyplot, drawing into files."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or install draftsmith[bench]") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: Path) -> None:
    """As a PNG of 64 colours (a third of the bytes), never half-written; the figure is closed."""
    from PIL import Image  # matplotlib needs it as well

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    figure.savefig(scratch, format="png", dpi=130)
    load_pyplot().close(figure)
    with Image.open(scratch) as picture:
        few = picture.convert("RGB").quantize(64, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(scratch, format="PNG", optimize=True)
    scratch.replace(path)
