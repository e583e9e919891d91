"""From the cells of results.py to its numbers and tables: sums and medians over prompts."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.scripts.measuring.measure import PLAIN, TRANSFORMERS
from draftsmith.scripts.measuring.report import summarise
from draftsmith.scripts.measuring.table import Grid, format_number

Cell = dict[str, Any]
ALL = "all"  # files of prompts together
LEGEND = (
    "acceptance length: tokens per verify step, the target's own token included (llama.cpp and `generate`: tokens per "
    "pass). tokens/s: of all prompts, prompt passes included. ×: medians over the prompts of the ratio of tokens/s to "
    "transformers' eager `generate`, and to this library's fastest plain decoding. same text: at T = 0 as `generate`, "
    "at T = 1 as plain decoding with the same seed."
)


def make_content(environment: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """The JSON: reports for each number of threads, temperature and file of prompts, and of all files together."""
    groups: dict[tuple[int, float], dict[str, list[Cell]]] = {}
    for cell in cells:
        threads, temperature, file, _ = cell["key"]
        groups.setdefault((threads, temperature), {}).setdefault(file, []).append(cell)
    reports = [
        {"threads": threads, "temperature": temperature, "prompts": name, "num_prompts": len(own)}
        | {"rows": make_rows(own)}
        for (threads, temperature), files in sorted(groups.items())
        for name, own in [*files.items(), (ALL, [cell for one in files.values() for cell in one])]
    ]
    return {"environment": dict(environment), "reports": reports}


def make_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row for each contender. Its acceptance length is the mean over the files of prompts."""
    runs: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for place, cell in enumerate(cells):
        for one in cell["runs"]:
            runs.setdefault((one["name"], one["tree"]), {})[place] = one
    plain = max((key for key in runs if key[0].startswith(PLAIN)), key=lambda key: _speed(runs[key].values()))
    rows = []
    for (name, tree), own in runs.items():
        files: dict[str, list[dict[str, Any]]] = {}
        for place, one in own.items():
            files.setdefault(cells[place]["key"][2], []).append(one)
        same = [one["same"] for one in own.values() if one["same"] is not None]
        over_transformers, quartiles = _compare(own, runs[TRANSFORMERS, ""])
        rows.append(
            {
                "name": name,
                "tree": tree,
                "problem": "",
                "tokens_per_second": _speed(own.values()),
                "over_transformers": over_transformers,
                "over_transformers_quartiles": quartiles,
                "over_plain": _compare(own, runs[plain])[0],
                "acceptance_length": statistics.fmean(map(_accept, files.values())),
                "num_identical": sum(same) if same else None,
                "num_compared": len(same),
            }
        )
    problems = {name: reason for cell in cells for name, reason in cell["problems"].items()}
    return rows + [{"name": name, "tree": "", "problem": reason} for name, reason in problems.items()]


def _speed(runs: Iterable[dict[str, Any]]) -> float:
    runs = list(runs)
    return float(sum(one["tokens"] for one in runs) / sum(one["seconds"] for one in runs))


def _accept(runs: Iterable[dict[str, Any]]) -> float:
    runs = [one for one in runs if one["steps"]]
    return sum(one["step_tokens"] for one in runs) / sum(one["steps"] for one in runs) if runs else 1.0


def _compare(
    own: Mapping[int, dict[str, Any]], other: Mapping[int, dict[str, Any]]
) -> tuple[float, tuple[float, float]]:
    """Median and quartiles over the prompts; two runs of a prompt are seconds apart."""
    return summarise([_speed([one]) / _speed([other[place]]) for place, one in own.items() if place in other])


def render_json(content: Mapping[str, Any]) -> str:
    """Numbers have four digits."""
    short = json.loads(json.dumps(content), parse_float=lambda text: float(f"{float(text):.4g}"))
    return json.dumps(short, indent=0, allow_nan=False) + "\n"


def render_page(content: Mapping[str, Any]) -> str:
    one = content["environment"]
    head = (
        f"```bash\n{one['command']}\n```\n\n{Path(one['target']).name}, {one['dtype']}, batch 1, up to "
        f"{one['max_new_tokens']} tokens a prompt, {one['cpu']} ({', '.join(one['cpu_flags'])}); torch {one['torch']}, "
        f"transformers {one['transformers']}; commit {one['commit']}. {LEGEND}\n"
    )
    return "\n".join([head, *(grid.to_markdown() for grid in _make_grids(content))])


def _make_grids(content: Mapping[str, Any]) -> Iterable[Grid]:
    groups: dict[tuple[int, float], dict[str, dict[str, Any]]] = {}
    for report in content["reports"]:
        groups.setdefault((report["threads"], report["temperature"]), {})[report["prompts"]] = report
    for (threads, temperature), group in groups.items():
        every = group.pop(ALL)
        lengths = {file: {(r["name"], r["tree"]): r for r in one["rows"]} for file, one in group.items()}
        cells, notes = [], []
        for row in sorted(every["rows"], key=lambda row: row.get("tokens_per_second", 0.0)):
            if row["problem"]:
                notes.append(f"{row['name']} did not run: {row['problem']}")
                continue
            own = [rows[row["name"], row["tree"]]["acceptance_length"] for rows in lengths.values()]
            same = "–" if row["num_identical"] is None else f"{row['num_identical']}/{row['num_compared']}"
            ratios = [format_number(row[key]) for key in ("over_transformers", "over_plain")]
            label = f"{row['name']}, {row['tree']}" if row["tree"] else row["name"]
            numbers = map(format_number, [*own, row["acceptance_length"]])
            cells.append([label, *numbers, f"{row['tokens_per_second']:.1f}", *ratios, same])
        columns = ["decoding", *lengths, "acceptance length", "tokens/s", "× generate", "× fastest plain", "same text"]
        title = f"{threads} thread{'s' * (threads > 1)}, T = {temperature:g}, {every['num_prompts']} prompts"
        yield Grid(title, columns, cells, notes)
