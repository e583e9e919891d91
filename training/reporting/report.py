"""`report.html`: one page that needs no network, with curves, acceptance by depth, examples, data and options."""

import base64
import importlib.util
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from jinja2 import Environment, FileSystemLoader

from draftsmith.inference import GenerationStats
from draftsmith.training.data.set_statistics import count_trained, row_lengths
from draftsmith.training.reporting.examples import Example

logger = logging.getLogger(__name__)

TEMPLATES = Path(__file__).parent / "templates"
_NO_PLOTS = 'No curves: matplotlib is not installed (pip install "draftsmith[train]").'
# Name of a plot -> key of the log lines, and the label of its curve.
_PLOTS = {
    "loss": {"loss": "training", "eval_loss": "held out"},
    "acceptance length": {"eval_acceptance_length": ""},
    "best drafted token is the target's own": {f"eval_top1_depth{depth}": f"depth {depth}" for depth in range(1, 9)},
    "learning rate": {"learning_rate": ""},
}


def render_report(
    title: str,
    *,
    summary: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    data: Mapping[str, Any],
    examples: Sequence[Example] = (),
    stats: GenerationStats | None = None,
) -> str:
    """Returns the page as HTML; `history` are the log lines, `stats` are of the examples' decoding."""
    has_plots = importlib.util.find_spec("matplotlib") is not None
    if not has_plots:
        logger.warning("%s", _NO_PLOTS)
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    return environment.get_template("report.html.jinja").render(
        title=title,
        summary=summary,
        plots=draw_plots(history) if has_plots else {},
        no_plots=_NO_PLOTS if not has_plots else "Nothing was logged.",
        by_depth=_by_depth(history, stats),
        examples=examples,
        data={name: f"{value:,}" if isinstance(value, int | float) else value for name, value in data.items()},
        options=options,
    )


def draw_plots(history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns name -> data URI of an SVG, for every plot that has values."""
    from matplotlib.figure import Figure

    plots = {}
    for name, curves in _PLOTS.items():
        figure = Figure(figsize=(4.6, 2.8), layout="constrained")
        axes = figure.subplots()
        for key, label in curves.items():
            points = [(line["step"], line[key]) for line in history if key in line]
            if points:
                axes.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else "", label=label)
        if not axes.lines:
            continue
        axes.set(title=name, xlabel="optimizer step")
        if any(curves.values()):
            axes.legend(fontsize="small")
        file = io.BytesIO()
        figure.savefig(file, format="svg")
        plots[name] = f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
    return plots


def _by_depth(history: Sequence[Mapping[str, Any]], stats: GenerationStats | None) -> list[tuple[int, str, str]]:
    accepted = [] if stats is None else stats.acceptance_by_depth
    last: Mapping[str, Any] = next((line for line in reversed(history) if "eval_top1_depth1" in line), {})
    num_right = sum(f"eval_top1_depth{depth}" in last for depth in range(1, 100))
    return [
        (
            depth,
            f"{accepted[depth - 1]:.1%}" if depth <= len(accepted) else "",
            f"{last[f'eval_top1_depth{depth}']:.1%}" if depth <= num_right else "",
        )
        for depth in range(1, max(len(accepted), num_right) + 1)
    ]


def count_rows(rows: datasets.Dataset) -> dict[str, int]:
    """The numbers that a report shows: rows, tokens, and tokens in the loss."""
    lengths = sorted(row_lengths(rows))
    return {
        "rows": len(lengths),
        "tokens": sum(lengths),
        "tokens in the loss": count_trained(rows),
        "median row, tokens": lengths[len(lengths) // 2],
        "longest row, tokens": lengths[-1],
    }
