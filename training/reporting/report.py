"""`report.html`: one page that needs no network, with curves, acceptance by depth, examples, data and options."""

from __future__ import annotations

import base64
import importlib.util
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from inference import GenerationStats
from training.reporting.examples import Example

logger = logging.getLogger(__name__)

TEMPLATES = Path(__file__).parent / "templates"
_NO_PLOTS = 'No curves: matplotlib is not installed (pip install "draftsmith[bench]").'
# Name of a plot -> key of the log lines, and the label of its curve.
_PLOTS = {
    "loss": {"loss": "training", "eval_loss": "held out"},
    "acceptance length": {"eval_acceptance_length": ""},
    "best drafted token is the target's own": {f"eval_top1_depth{depth}": f"depth {depth}" for depth in range(1, 9)},
    "learning rate": {"learning_rate": ""},
    "tokens a second": {"tokens_per_second": ""},
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
    """Returns the page as HTML.

    Args:
        history: log lines of the trainer.
        stats: statistics of the examples' decoding.
    """
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

    lines = add_throughput(history)
    plots = {}
    for name, curves in _PLOTS.items():
        figure = Figure(figsize=(4.6, 2.8), layout="constrained")
        axes = figure.subplots()
        for key, label in curves.items():
            points = [(line["step"], line[key]) for line in lines if key in line]
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


def add_throughput(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Adds `tokens_per_second` since the previous line to log lines; a resumed run's clock starts at 0 again."""
    lines: list[dict[str, Any]] = []
    tokens, seconds = 0, 0.0
    for entry in history:
        line = dict(entry)
        if "loss" in line and "train_runtime" in line and "num_input_tokens_seen" in line:
            new_tokens, new_seconds = line["num_input_tokens_seen"] - tokens, line["train_runtime"] - seconds
            tokens, seconds = line["num_input_tokens_seen"], line["train_runtime"]
            if new_seconds > 0:
                line["tokens_per_second"] = new_tokens / new_seconds
        lines.append(line)
    return lines


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
