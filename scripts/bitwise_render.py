"""The reports of bitwise_verify.py as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmark_render import Grid

LEGEND = """
Each cell compares rows of numbers of two runs that differ in one thing: "equal" if all rows are bitwise equal, else how
many are, and the largest difference in steps (a step is the distance of neighbouring numbers of the dtype at the size
of the row's largest number).

The first table compares the logits behind every token of one text, read by passes of different shapes. Each fills a
cache of its own behind the same prompt, so a difference stays in the cache and reaches what follows. Unless a line
says otherwise, the other side is plain decoding through passes of a fixed shape: one token a pass as the root, other
rows padding that sees itself alone, and a fixed view of the cache. In chains and trees the text's tokens are mixed with
wrong ones: how many of a pass are kept, and at which nodes of a tree they stand, is drawn. "The text's nodes first" is
a tree whose path lies in neighbouring slots; in other trees slots of wrong nodes lie between those of the path. Views
that grow are a `Decoder`'s: as many slots as are needed, rounded up to 64.

The second table runs operations of the target's first layer, and its LM head, on random numbers.
"""


def render(reports: Sequence[dict[str, Any]]) -> str:
    """Two tables with a column for each dtype and way to run, and what passes cost."""
    environment = reports[0]["environment"]
    gpu = environment["gpu"] or f"{environment['cpu']} ({', '.join(environment['cpu_flags'])})"
    commands = dict.fromkeys(report["environment"]["command"] for report in reports)
    parts = [
        "# Plain decoding and verification, bit by bit",
        LEGEND,
        "```bash\n" + "\n".join(commands) + "\n```",
        f"{environment['target']}; {gpu}, {environment['threads']} threads, torch {environment['torch']}, transformers "
        f"{environment['transformers']}, commit {environment['commit']}; a prompt of "
        f"{environment['num_prompt_tokens']} tokens and a text of {environment['max_new_tokens']}.",
        _render_passes(reports).to_markdown(),
        *(grid.to_markdown() for grid in _render_operations(reports)),
        _render_costs(reports).to_markdown(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def describe(finding: dict[str, Any] | None) -> str:
    """A cell; a dash where nothing was compared.

    >>> describe({"num_rows": 8, "num_equal": 8, "max_steps": 0.0}), describe(None)
    ('equal', '–')
    >>> describe({"num_rows": 8, "num_equal": 2, "max_steps": 1.25})
    '2/8, 1.2'
    """
    if finding is None:
        return "–"
    if finding["num_equal"] == finding["num_rows"]:
        return "equal"
    return f"{finding['num_equal']}/{finding['num_rows']}, {finding['max_steps']:.2g}"


def _render_passes(reports: Sequence[dict[str, Any]]) -> Grid:
    columns: dict[str, dict[str, dict[str, Any]]] = {
        f"{report['environment']['dtype']}, {name}": {one["factor"]: one for one in findings}
        for report in reports
        for name, findings in report["passes"].items()
    }
    labels = dict.fromkeys(label for found in columns.values() for label in found)
    cells = [[label, *(describe(found.get(label)) for found in columns.values())] for label in labels]
    return Grid("Whole passes: logits of the same text", ["what differs", *columns], cells)


def _render_operations(reports: Sequence[dict[str, Any]]) -> list[Grid]:
    """One table for each operation."""
    found = {
        (one["operation"], one["factor"], report["environment"]["dtype"]): one
        for report in reports
        for one in report["operations"]
    }
    dtypes = [report["environment"]["dtype"] for report in reports]
    grids = []
    for operation in dict.fromkeys(operation for operation, _, _ in found):
        factors = dict.fromkeys(factor for name, factor, _ in found if name == operation)
        cells = [[factor, *(describe(found.get((operation, factor, dtype))) for dtype in dtypes)] for factor in factors]
        grids.append(Grid(f"One operation: {operation}", ["what differs", *dtypes], cells))
    return grids


def _render_costs(reports: Sequence[dict[str, Any]]) -> Grid:
    columns = {
        f"{report['environment']['dtype']}, {mode}": times
        for report in reports
        for mode, times in report["milliseconds"].items()
    }
    sizes = sorted({int(size) for times in columns.values() for size in times})
    cells = []
    for size in sizes:
        line = [str(size)]
        for times in columns.values():
            own = times.get(str(size))
            line.append("–" if own is None else f"{own:.1f} ({own / times['1']:.2f})")
        cells.append(line)
    title = "Milliseconds of processor time of a pass, sdpa, by its rows (beside one row): medians"
    return Grid(title, ["rows", *columns], cells)
