"""Draws an SVG chart of speeds relative to transformers' `generate`, with every plain baseline.

    python scripts/benchmarks/speed_chart.py --json docs/benchmarks/speed.json --svg docs/images/speed.svg
    python scripts/benchmarks/speed_chart.py --json docs/benchmarks/heads.json --temperature 1 --svg FILE.svg

`draftsmith bench --json` and `drafters.py` write the JSON. The chart shows each drafter's fastest row, and the mean of
all reports with the given temperature (one report for each file of prompts).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.options import option
from draftsmith.training.options.command_line import ProgramParser
from draftsmith.training.options.one_line_errors import one_line_errors

PLAIN = ("transformers generate", "plain decoding")
COLOURS = {"plain": "#94a3b8", "untrained": "#60a5fa", "heads": "#1d4ed8"}
LEFT, BAR, ROW, TOP, WIDTH = 280, 390, 26, 66, 880  # pixels

Row = dict[str, Any]


@dataclass
class ChartArguments:
    json: str = option(help="Results of draftsmith bench --json, or of drafters.py.")
    svg: str = option(help="The SVG file to write.")
    temperature: float = option(default=0.0, help="Draw the reports with this temperature.")


def choose_rows(rows: list[Row], heads: list[str]) -> list[tuple[str, Row]]:
    """(kind, row) of every baseline, and of each drafter with its fastest tree and mode; slowest first in each kind."""
    chosen: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["problem"]:
            continue
        drafter = row["name"].removesuffix(", compiled")
        kind = "plain" if drafter.startswith(PLAIN) else "heads" if drafter in heads else "untrained"
        key = (kind, row["name"] if kind == "plain" else drafter)
        if key not in chosen or row["over_transformers"] > chosen[key]["over_transformers"]:
            chosen[key] = row
    order = list(COLOURS)
    kinds = sorted(chosen, key=lambda key: (order.index(key[0]), chosen[key]["over_transformers"]))
    return [(key[0], chosen[key]) for key in kinds]


def mean_of(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report whose rows hold the means over all reports."""
    rows = []
    for row in reports[0]["rows"]:
        same = [other for report in reports for other in report["rows"] if _key(other) == _key(row)]
        quartiles = [
            sum(values) / len(same) for values in zip(*(r["over_transformers_quartiles"] for r in same), strict=True)
        ]
        means = {name: sum(r[name] for r in same) / len(same) for name in ("over_transformers", "acceptance_length")}
        rows.append(row | means | {"over_transformers_quartiles": quartiles})
    environment = dict(reports[0]["environment"])
    environment["num_prompts"] = sum(report["environment"]["num_prompts"] for report in reports)
    return {"environment": environment, "rows": rows}


def _key(row: Row) -> tuple[str, str]:
    return row["name"], row["tree"]


def describe(environment: dict[str, Any]) -> str:
    return (
        f"{Path(environment['target']).name}, {environment['dtype']}, T = {environment['temperature']:g}, batch "
        f"{environment['batch']}, {environment['num_prompts']} held-out prompts, {environment['cpu']}, "
        f"{environment['threads']} thread; bars: median, lines: quartiles"
    )


def draw(report: dict[str, Any]) -> str:
    """The SVG's text; the same report gives the same text."""
    heads = [Path(path).name for path in report["environment"]["heads"]]
    rows = choose_rows(report["rows"], heads)
    longest = max(row["over_transformers_quartiles"][1] for _, row in rows)
    scale = BAR / longest
    fastest = max(row["over_transformers"] for kind, row in rows if kind == "plain")
    bottom = TOP + ROW * len(rows)
    parts = [
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{bottom + 35}" rx="10" fill="#ffffff" stroke="#e2e8f0"/>',
        _text(20, 26, "Speed beside transformers' generate", 'font-size="15" font-weight="bold"'),
        _text(20, 46, describe(report["environment"]), 'font-size="12" fill="#475569"'),
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


def main() -> None:
    with one_line_errors("speed_chart.py"):
        (args,) = ProgramParser([ChartArguments], doc=__doc__).read()
        reports = json.loads(Path(args.json).read_text(encoding="utf-8"))["reports"]
        reports = [one for one in reports if one["environment"]["temperature"] == args.temperature]
        if not reports:
            raise ValueError(f"{args.json} has no report with temperature {args.temperature:g}: give another one")
        write_text(Path(args.svg), draw(mean_of(reports)))
        print(f"wrote {args.svg}")


if __name__ == "__main__":
    main()
