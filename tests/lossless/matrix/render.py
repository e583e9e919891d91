"""The generated part of docs/lossless.md, from a whole run."""

from collections.abc import Callable, Iterable, Mapping, Sequence

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


def render(results: Sequence[Result], gaps: Sequence[str], environment: Mapping[str, str]) -> str:
    """The part, markers included."""
    near_ties = [f"{result.cell.name}: {tie}" for result in results for tie in result.outcome.ties]
    different = [f"{result.cell.name}: {result.reason}" for result in results if result.status == DIFFERENT]
    totals = [
        ("cells", len(results)),
        ("tokens compared", sum(result.outcome.num_tokens for result in results)),
        ("rows compared", sum(result.outcome.num_rows for result in results)),
        ("cells with a different token", len(different)),
        ("rows that differ at a proven near-tie", len(near_ties)),
        ("required places that no step reached", len(gaps)),
    ]
    axes = []
    for axis, value_of in AXES.items():
        tokens: dict[str, int] = {}
        for result in results:
            value = value_of(result.cell)
            tokens[value] = tokens.get(value, 0) + result.outcome.num_tokens
        least = min(tokens, key=lambda value: tokens[value])
        axes.append((axis, len(tokens), f"{tokens[least]:,} ({least})"))
    greedy = [result for result in results if result.cell.part == "greedy"]
    accepted = {policy: sum_histograms(one for one in greedy if one.cell.case.policy == policy) for policy in POLICIES}
    depth = max(map(len, accepted.values()))
    parts = [
        BEGIN,
        table(("", "number"), [(name, f"{number:,}") for name, number in totals]),
        ", ".join(f"{name}: {value}" for name, value in environment.items()) + ".",
        table(("axis", "values", "fewest tokens compared with one value"), axes),
        "Greedy decoding with the scripted drafter, all targets and batch sizes: verify steps by the number of drafts "
        "that they accepted.",
        table(
            ("tree policy", *map(str, range(depth))),
            [(policy, *(f"{steps:,}" for steps in histogram)) for policy, histogram in accepted.items()],
        ),
        *(_list("Near-ties", near_ties), _list("Differences", different), _list("Not reached", gaps)),
        END,
    ]
    return "\n\n".join(part for part in parts if part)


def replace_between_markers(page: str, part: str) -> str:
    """The page with another generated part."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/lossless.md has no part between {BEGIN!r} and {END!r}")
    return head + part + tail


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---', *['---:' for _ in head[1:]]])} |"]
    padded = [[*map(str, row), *[""] * (len(head) - len(row))] for row in rows]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in padded)])


def _list(title: str, lines: Sequence[str]) -> str:
    return f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""
