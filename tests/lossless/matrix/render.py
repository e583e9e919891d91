"""The summary of a whole run: docs/lossless.json, and the generated part of docs/lossless.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from tests.lossless.matrix.cells import Cell
from tests.lossless.matrix.drafters import POLICIES
from tests.lossless.matrix.results import DIFFERENT, Result, sum_histograms

BEGIN, END = "<!-- matrix: begin (make lossless) -->", "<!-- matrix: end -->"

AXES: dict[str, Callable[[Cell], str]] = {
    "target, attention": lambda cell: f"{cell.case.family}, {cell.case.attention}",
    "drafter": lambda cell: cell.case.drafter,
    "tree policy": lambda cell: str(cell.case.policy),
    "acceptance rule": lambda cell: cell.case.acceptance,
    "sampling": lambda cell: cell.case.sampling,
    "batch size": lambda cell: str(cell.batch),
    "padding side": lambda cell: cell.case.padding,
    "prefill chunk": lambda cell: str(cell.case.prefill_chunk),
}


@dataclass
class Summary:
    """A whole run in a few kilobytes.

    cells: number of cells. fingerprint: hash of their names, in order. tokens, rows: compared. near_ties, different,
    gaps: one line for each. axes: tokens compared with each value of each axis. accepted: for each policy of the
    complete part, the number of steps that accepted 0, 1, 2, ... drafts.
    """

    environment: dict[str, str]
    cells: int
    fingerprint: str
    tokens: int
    rows: int
    near_ties: list[str]
    different: list[str]
    gaps: list[str]
    axes: dict[str, dict[str, int]]
    accepted: dict[str, list[int]]


def fingerprint(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def summarise(results: Sequence[Result], gaps: Sequence[str], environment: Mapping[str, str]) -> Summary:
    greedy = [result for result in results if result.cell.part == "greedy"]
    return Summary(
        environment=dict(environment),
        cells=len(results),
        fingerprint=fingerprint(result.cell.name for result in results),
        tokens=sum(result.outcome.num_tokens for result in results),
        rows=sum(result.outcome.num_rows for result in results),
        near_ties=[f"{result.cell.name}: {tie}" for result in results for tie in result.outcome.ties],
        different=[f"{result.cell.name}: {result.reason}" for result in results if result.status == DIFFERENT],
        gaps=list(gaps),
        axes={axis: _tokens_by_value(results, value_of) for axis, value_of in AXES.items()},
        accepted={
            policy: sum_histograms(result for result in greedy if result.cell.case.policy == policy)
            for policy in POLICIES
        },
    )


def _tokens_by_value(results: Sequence[Result], value_of: Callable[[Cell], str]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for result in results:
        value = value_of(result.cell)
        tokens[value] = tokens.get(value, 0) + result.outcome.num_tokens
    return tokens


def to_json(summary: Summary) -> str:
    return json.dumps(asdict(summary), indent=1) + "\n"


def from_json(text: str) -> Summary:
    return Summary(**json.loads(text))


def render(summary: Summary) -> str:
    """The generated part of docs/lossless.md, markers included."""
    totals = [
        ("cells", f"{summary.cells:,}"),
        ("tokens compared", f"{summary.tokens:,}"),
        ("rows compared", f"{summary.rows:,}"),
        ("cells with a different token", len(summary.different)),
        ("rows that differ at a proven near-tie", len(summary.near_ties)),
        ("required places that no step reached", len(summary.gaps)),
    ]
    axes = []
    for axis, tokens in summary.axes.items():
        least = min(tokens, key=lambda value: tokens[value])
        axes.append((axis, len(tokens), f"{tokens[least]:,} ({least})"))
    accepted = [(policy, *(f"{steps:,}" for steps in histogram)) for policy, histogram in summary.accepted.items()]
    depth = max(len(histogram) for histogram in summary.accepted.values())
    parts = [
        BEGIN,
        table(("", "number"), totals),
        ", ".join(f"{name}: {value}" for name, value in summary.environment.items()) + ".",
        table(("axis", "values", "fewest tokens compared with one value"), axes),
        "Greedy decoding with the scripted drafter, all targets and batch sizes: verify steps by the number of drafts "
        "that they accepted.",
        table(("tree policy", *map(str, range(depth))), accepted),
        *(_list("Near-ties", summary.near_ties), _list("Differences", summary.different)),
        _list("Not reached", summary.gaps),
        END,
    ]
    return "\n\n".join(part for part in parts if part)


def replace_between_markers(page: str, summary: Summary) -> str:
    """The page with its generated part written anew."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/lossless.md has no part between {BEGIN!r} and {END!r}")
    return head + render(summary) + tail


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---', *['---:' for _ in head[1:]]])} |"]
    padded = [[*map(str, row), *[""] * (len(head) - len(row))] for row in rows]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in padded)])


def _list(title: str, lines: Sequence[str]) -> str:
    return f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""
