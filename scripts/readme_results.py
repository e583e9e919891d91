"""Writes the README's result tables from the JSON files in docs/benchmarks, so that they cannot say anything else.

python scripts/readme_results.py            # rewrite the part of README.md between the two markers
python scripts/readme_results.py --check    # only say whether it is up to date (exit status 1 if not)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: begin (scripts/readme_results.py) -->", "<!-- results: end -->"
BASELINES = ("transformers generate", "plain decoding")
SPEED = "cpu-validation-t0"
# Benchmark file -> its column of acceptance lengths.
COLUMNS = {
    "cpu-validation-t0-fp32": "validation, T=0",
    "cpu-validation-t1": "validation, T=1",
    "cpu-mt-bench-t0": "MT-Bench, T=0",
    "cpu-mt-bench-t1": "MT-Bench, T=1",
}

Report = dict[str, Any]


def load_report(stem: str) -> Report:
    """The one report of a benchmark file: these files hold one combination of target, prompts and temperature each."""
    path = ROOT / "docs" / "benchmarks" / f"{stem}.json"
    reports: list[Report] = json.loads(path.read_text(encoding="utf-8"))["reports"]
    if len(reports) != 1:
        raise ValueError(
            f"{path} holds {len(reports)} reports; a column of the README shows one: run benchmark.py with one "
            "--target, one --prompts and one --temperature"
        )
    return reports[0]


def acceptance_table(reports: dict[str, Report]) -> list[str]:
    """Acceptance length of every drafter with the first tree of each report, texts equal to the reference beside it."""
    titles = [f"{title} ({report['environment']['dtype']})" for title, report in reports.items()]
    lines = [_line("drafter", *titles), _line("---", *("---" for _ in titles))]
    cells: dict[str, list[str]] = {}
    for place, report in enumerate(reports.values()):
        tree = report["environment"]["trees"][0]
        for row in report["rows"]:
            if row["tree"] == tree and not row["problem"] and "compiled" not in row["name"]:
                own = cells.setdefault(row["name"], ["–"] * len(reports))
                own[place] = f"{row['acceptance_length']:.2f} ({row['num_identical']}/{row['num_compared']})"
    return lines + [_line(name, *own) for name, own in cells.items()]


def speed_table(report: Report) -> list[str]:
    """Everybody's speed beside `generate`, and beside the fastest plain decoding of the run."""
    rows = [row for row in report["rows"] if not row["problem"]]
    plain = max(row["tokens_per_second"] for row in rows if row["name"].startswith(BASELINES))
    lines = [
        _line("", "tree", "× `generate` (quartiles)", "× the fastest plain decoding", "acceptance length"),
        _line(*["---"] * 5),
    ]
    for row in rows:
        low, high = row["over_transformers_quartiles"]
        lines.append(
            _line(
                row["name"],
                row["tree"],
                f"{row['over_transformers']:.2f} ({low:.2f} to {high:.2f})",
                f"{row['tokens_per_second'] / plain:.2f}",
                f"{row['acceptance_length']:.2f}",
            )
        )
    return lines


def render() -> str:
    speed = load_report(SPEED)
    machine = speed["environment"]
    description = (
        f"{machine['cpu']}, {machine['threads']} thread(s), {machine['dtype']}, batch 1, {machine['num_prompts']} "
        f"validation prompts of up to {machine['max_new_tokens']} tokens, T={machine['temperature']:g}, medians of "
        f"{machine['repeats']} interleaved rounds:"
    )
    reports = {title: load_report(stem) for stem, title in COLUMNS.items()}
    return "\n".join([BEGIN, *acceptance_table(reports), "", description, "", *speed_table(speed), END])


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def replace_between_markers(text: str, new: str) -> str:
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no part between {BEGIN!r} and {END!r}")
    return head + new + tail


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="Change nothing; exit with 1 if README.md is out of date.")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    try:
        old = readme.read_text(encoding="utf-8")
        new = replace_between_markers(old, render())
    except (ValueError, OSError) as error:
        sys.exit(f"readme_results.py: {error}")
    if args.check:
        sys.exit(0 if new == old else "README.md is out of date: run python scripts/readme_results.py")
    scratch = readme.with_name(".README.md.tmp")
    scratch.write_text(new, encoding="utf-8")
    scratch.replace(readme)


if __name__ == "__main__":
    main()
