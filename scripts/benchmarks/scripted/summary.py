"""What sizes.py found: speed-ups over the fastest plain decoding, shares of a step, tables and a chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from draftsmith.scripts.measuring.plot import load_pyplot, save_figure
from draftsmith.scripts.measuring.table import Grid, format_number

SIMULATED = "Random weights; the acceptance length is SIMULATED, costs are measured."


@dataclass(frozen=True)
class Row:
    """A contender beside the plain decoding that took turns with it.

    Attributes:
        fastest: seconds per token of the fastest plain decoding of any dtype; fastest_way: which one that is.
        step: seconds of a step. parts: shares of the fastest plain step of the same dtype.
        overhead: share of the step that is neither the drafter's forwards nor verification; None where not measured.
        speedups: acceptance length -> speed over `fastest`, the median over repeats.
    """

    size: str
    name: str
    way: str
    is_drafting: bool
    fastest: float
    fastest_way: str
    step: float
    parts: dict[str, float]
    overhead: float | None
    speedups: dict[int, float]

    @property
    def break_even(self) -> float:
        """The acceptance length at which drafting is as fast as the fastest plain decoding."""
        return self.step / self.fastest


def compare(groups: Sequence[dict[str, Any]]) -> list[Row]:
    """The rows of all groups of contenders that took turns (`sizes.measure_kind`)."""
    return [row for group in groups for row in _compare_group(group["size"], group["contenders"])]


def _compare_group(size: str, contenders: Sequence[dict[str, Any]]) -> Iterator[Row]:
    plain = sorted((one for one in contenders if one["name"] == "plain"), key=_find_step)
    fastest = plain[0]
    bases = [sample["seconds"] for sample in fastest["samples"][1]]
    for one in contenders:
        samples = [sample for some in one["samples"].values() for sample in some]
        own = _find_step(next(other for other in plain if other["dtype"] == one["dtype"]))
        speedups = {
            length: median(base * length / sample["seconds"] for base, sample in zip(bases, some, strict=False))
            for length, some in one["samples"].items()
        }
        outside = [1 - sum(sample["parts"].values()) / sample["seconds"] for sample in samples if sample["parts"]]
        yield Row(
            size,
            one["name"],
            _describe(one),
            bool(one["tree"]),
            _find_step(fastest),
            _describe(fastest),
            _find_step(one),
            {part: median(sample["parts"][part] for sample in samples) / own for part in samples[0]["parts"]},
            median(outside) if outside else None,
            speedups,
        )


def _find_step(contender: dict[str, Any]) -> float:
    return median(sample["seconds"] for samples in contender["samples"].values() for sample in samples)


def _describe(contender: dict[str, Any]) -> str:
    return ", ".join(contender[part] for part in ("dtype", "mode", "tree") if contender[part])


def find_best(rows: Sequence[Row], size: str, name: str, length: int) -> Row | None:
    """The fastest row of these heads at an acceptance length."""
    found = [row for row in rows if (row.size, row.name) == (size, name) and length in row.speedups]
    return max(found, key=lambda row: row.speedups[length], default=None)


def find_heads(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Size and kind -> the least break-even of any dtype, mode and tree."""
    found: dict[tuple[str, str], float] = {}
    for row in (row for row in rows if row.is_drafting):
        key = (row.size, row.name)
        found[key] = min(row.break_even, found.get(key, row.break_even))
    return found


def make_grids(rows: Sequence[Row], lengths: Sequence[int]) -> list[Grid]:
    """The best heads at each acceptance length; what each step costs."""
    cells = []
    for (size, name), break_even in find_heads(rows).items():
        best = [(length, find_best(rows, size, name, length)) for length in lengths]
        texts = [f"{row.speedups[length]:.2f} ({row.way})" if row else "–" for length, row in best]
        cells.append([f"{size}, {name}", f"{break_even:.2f}", *texts])
    columns = ["size, heads", "break-even", *(f"acceptance length {length}" for length in lengths)]
    legend = "speed over the fastest plain decoding of any dtype; break-even: the acceptance length with speed 1"
    speeds = Grid(SIMULATED, columns, cells, [legend])
    cells = [
        [
            f"{row.size}, {row.name}, {row.way}",
            f"{1000 * row.step:.2f}",
            *(format_number(row.parts.get(part)) for part in ("draft", "verify")),
            format_number(row.overhead, ".1%"),
            f"{row.break_even:.2f}",
        ]
        for row in rows
    ]
    columns = ["size, decoding", "ms per step", "draft / plain step", "verify / plain step", "overhead", "break-even"]
    legend = (
        "plain step: the fastest of the same dtype; draft: the drafter's forwards (compiled: with the tree's growth); "
        "overhead: share of the step outside the drafter's and the target's forwards; plain decoding is measured again "
        "with each kind and dtype of heads"
    )
    return [speeds, Grid("What a step costs", columns, cells, [legend])]


def draw_sizes(path: Path, rows: Sequence[Row], lengths: Sequence[int], title: str) -> None:
    """A PNG: for each size the best speed-up of each kind over acceptance lengths; then all break-even lengths."""
    plt = load_pyplot()
    break_evens = find_heads(rows)
    sizes, kinds = (list(dict.fromkeys(key[place] for key in break_evens)) for place in (0, 1))
    figure, axes = plt.subplots(1, len(sizes) + 1, figsize=(4 * (len(sizes) + 1), 4.2), layout="constrained")
    width = 0.8 / len(kinds)
    for (place, kind), (index, size) in product(enumerate(kinds), enumerate(sizes)):
        colour, axis = f"C{place}", axes[index]
        best = [(length, row) for length in lengths if (row := find_best(rows, size, kind, length))]
        axis.plot([length for length, _ in best], [row.speedups[length] for length, row in best], marker="o",
                  color=colour, label=kind)  # fmt: skip
        bar = axes[-1].bar(index + width * place, break_evens.get((size, kind), 0.0), width, color=colour)
        axes[-1].bar_label(bar, fmt="%.2f", fontsize=8)
    for size, axis in zip(sizes, axes, strict=False):
        first = next(row for row in rows if row.size == size)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{size}: plain {1000 * first.fastest:.1f} ms ({first.fastest_way})", fontsize=9)
        axis.set_xlabel("simulated acceptance length")
        axis.set_xticks(list(lengths))
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("speed over the fastest plain decoding")
    axes[0].legend(fontsize=8, frameon=False)
    axes[-1].set_xticks([index + 0.4 - width / 2 for index in range(len(sizes))], sizes)
    axes[-1].set_title("break-even acceptance length", fontsize=9)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{SIMULATED} {title}", fontsize=9, wrap=True)
    save_figure(figure, path)
