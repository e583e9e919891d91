"""Draws the numbers of results.py as an SVG: speeds relative to transformers' `generate`, with every plain baseline.

The chart shows the lowest temperature, the fewest threads, all files of prompts together, and each drafter's fastest
tree.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from draftsmith.scripts.benchmarks.results_summary import ALL
from draftsmith.scripts.measuring.contenders import NGRAMS
from draftsmith.scripts.measuring.measure import PLAIN, TRANSFORMERS

COLOURS = {"plain": "#94a3b8", "untrained": "#60a5fa", "heads": "#1d4ed8"}
LEFT, BAR, ROW, TOP, WIDTH = 280, 390, 26, 66, 880  # pixels

Row = dict[str, Any]


def choose_rows(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """(kind, row) of every baseline, and of each drafter with its fastest tree; slowest first in each kind."""
    chosen: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["problem"]:
            continue
        name = row["name"]
        kind = "plain" if not row["tree"] else "untrained" if name == NGRAMS else "heads"
        if (kind, name) not in chosen or row["over_transformers"] > chosen[kind, name]["over_transformers"]:
            chosen[kind, name] = row
    order = list(COLOURS)
    kinds = sorted(chosen, key=lambda key: (order.index(key[0]), chosen[key]["over_transformers"]))
    return [(key[0], chosen[key]) for key in kinds]


def describe(environment: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    threads = report["threads"]
    return (
        f"{Path(environment['target']).name}, {environment['dtype']}, T = {report['temperature']:g}, batch 1, "
        f"{report['num_prompts']} prompts, {environment['cpu']}, {threads} thread{'s' * (threads > 1)}; bars: median, "
        "lines: quartiles"
    )


def draw(content: Mapping[str, Any]) -> str:
    """The SVG's text. content: as `make_content` makes it, with a report at least."""
    environment = content["environment"]
    every = (one for one in content["reports"] if one["prompts"] == ALL)
    report = min(every, key=lambda one: (one["threads"], one["temperature"]))
    rows = choose_rows(report["rows"])
    longest = max(row["over_transformers_quartiles"][1] for _, row in rows)
    scale = BAR / longest
    fastest = max(row["over_transformers"] for _, row in rows if row["name"].startswith((TRANSFORMERS, PLAIN)))
    bottom = TOP + ROW * len(rows)
    parts = [
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{bottom + 35}" rx="10" fill="#ffffff" stroke="#e2e8f0"/>',
        _text(20, 26, "Speed beside transformers' generate", 'font-size="15" font-weight="bold"'),
        _text(20, 46, describe(environment, report), 'font-size="12" fill="#475569"'),
    ]
    line = LEFT + scale * fastest
    parts += [
        f'<path d="M{line:.1f} {TOP} V{bottom + 4}" stroke="#b91c1c" stroke-dasharray="4 3"/>',
        _text(line, bottom + 20, "fastest plain decoding", 'font-size="12" fill="#b91c1c" text-anchor="middle"'),
    ]
    for index, (kind, row) in enumerate(rows):
        middle = TOP + ROW * index + ROW / 2
        low, high = (LEFT + scale * value for value in row["over_transformers_quartiles"])
        tree = f" ({row['tree']})" if row["tree"] else ""
        label = f"{row['over_transformers']:.2f}×"
        if kind != "plain":
            label += f", {row['acceptance_length']:.2f} tokens a pass"
        parts += [
            _text(LEFT - 10, middle + 4, row["name"] + tree, 'font-size="12" text-anchor="end"'),
            f'<rect x="{LEFT}" y="{middle - 8:.1f}" width="{scale * row["over_transformers"]:.1f}" height="16" rx="2" '
            f'fill="{COLOURS[kind]}"/>',
            f'<path d="M{low:.1f} {middle:.1f} H{high:.1f}" stroke="#0f172a" stroke-width="1.2"/>',
            _text(max(high, LEFT + scale * row["over_transformers"]) + 8, middle + 4, label, 'font-size="12"'),
        ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 36}" width="{WIDTH}" '
    font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" fill="#0f172a">'
    return "\n".join([head + font, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, attributes: str) -> str:
    halo = 'stroke="#ffffff" stroke-width="4" paint-order="stroke"'  # keeps text readable across lines
    return f'<text x="{x:.1f}" y="{y:.1f}" {halo} {attributes}>{escape(text, quote=False)}</text>'
