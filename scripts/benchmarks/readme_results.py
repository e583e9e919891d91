"""Writes the README's result tables from the JSON files in docs/benchmarks, so that they cannot say anything else.

python scripts/benchmarks/readme_results.py            # rewrite the part of README.md between the two markers
python scripts/benchmarks/readme_results.py --check    # only say whether it is up to date (exit status 1 if not)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks.drafter_portions import read_reports
from scripts.benchmarks.drafter_results import NONE, Results

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results: begin (scripts/benchmarks/readme_results.py) -->", "<!-- results: end -->"
BASELINES = ("transformers generate", "plain decoding")
SPEED = "cpu-validation-t0"
DRAFTERS = "drafters"
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


def drafters_table(results: Results) -> list[str]:
    """Acceptance length and speed beside `generate` of all drafters: of each file of prompts at the lowest temperature,
    and the means of all files at the other ones."""
    low = results.lowest_temperature
    single = [where for where in results.titles if where[1] == low]
    higher = sorted({temperature for _, temperature in results.titles} - {low})
    groups = [[where] for where in single] + [[(where[0], t) for where in single] for t in higher]
    titles = [results.titles[where] for where in single] + [f"all of them, T={t:g}" for t in higher]
    lines = [_line("drafter", "parameters", "trained on", *titles), _line("---", *["---:"] * (len(titles) + 2))]
    for name in (*results.drafters, *results.others):
        info = results.drafters.get(name, {"num_parameters": 0, "training": {}})
        tokens = info["training"].get("tokens")
        parameters = f"{info['num_parameters'] / 1e6:.2f} M" if info["num_parameters"] else NONE
        means = [results.show_mean(name, group) for group in groups]
        lines.append(_line(name, parameters, f"{tokens / 1e6:.1f} M tokens" if tokens else NONE, *means))
    return lines


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
    drafters = Results(read_reports(ROOT / "docs" / "benchmarks" / f"{DRAFTERS}.json"))
    parts = [drafters_table(drafters), _describe_drafters(drafters), acceptance_table(reports)]
    parts += [[description], speed_table(speed)]
    return "\n".join([BEGIN, "\n\n".join("\n".join(lines) for lines in parts), END])


def _describe_drafters(results: Results) -> list[str]:
    one = results.reports[0]["environment"]
    mode = "compiled" if one["conditions"]["compile"] else "eager"
    return [
        f"Above: {one['cpu']}, {one['threads']} thread(s), {one['dtype']}, batch 1, drafters {mode}, tree "
        f"{one['trees'][0]}, {one['num_prompts']} prompts of each file, up to {one['max_new_tokens']} tokens each, "
        f"{one['repeats']} interleaved rounds; acceptance length, median speed beside transformers' eager `generate`.",
        "",
        "EAGLE-2's dynamic trees of 32 nodes, acceptance length alone; in brackets how many texts equal transformers' "
        "own (T=0) or plain decoding's with the same seed (T=1):",
    ]


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
        sys.exit(0 if new == old else "README.md is out of date: run python scripts/benchmarks/readme_results.py")
    scratch = readme.with_name(".README.md.tmp")
    scratch.write_text(new, encoding="utf-8")
    scratch.replace(readme)


if __name__ == "__main__":
    main()
