"""Measures training steps: tokens per second, where the time goes and peak memory, against a plain implementation.

    python scripts/benchmarks/training_speed.py --json outputs/training.json --markdown outputs/training.md

`scripts/benchmarks/plain_training.py` is what it is compared with: the same heads, batch and loss
(asserted), dense tensors. Steps of all implementations take turns in one process. `--targets` are folders, hub ids, or
shapes of random weights: wide (small, with a vocabulary of 32,768), 1b, 8b.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich.console import Console
from transformers import HfArgumentParser

from heads import HEAD_TYPES
from scripts.benchmarks.environment import describe_machine, describe_program
from scripts.benchmarks.plot import load_pyplot, save_figure
from scripts.benchmarks.render import Grid
from scripts.benchmarks.report import write_text
from scripts.benchmarks.training_cells import OURS, PARTS, PLAIN, PLAIN_SDPA, Cell, Timing, measure_memory, time_steps

MIB = 1 << 20
IMPLEMENTATIONS = [OURS, PLAIN, PLAIN_SDPA]
FIRST_KIND = "eagle3"  # the one that is measured over all lengths


@dataclass
class TrainingBenchmarkArguments:
    targets: list[str] = field(
        default_factory=lambda: ["examples/chat-13m", "wide"],
        metadata={"help": "Targets: folders, hub ids, or shapes of random weights (wide, 1b, 8b)."},
    )
    lengths: list[int] = field(
        default_factory=lambda: [512, 1024, 2048, 4096, 8192], metadata={"help": "Tokens of a row, for EAGLE-3."}
    )
    kinds: list[str] = field(
        default_factory=lambda: sorted(HEAD_TYPES), metadata={"help": "Kinds of heads, at --kinds_length tokens a row."}
    )
    kinds_length: int = field(default=2048, metadata={"help": "Tokens of a row when kinds are compared."})
    plain_up_to: int = field(
        default=2048, metadata={"help": "Longest rows, in tokens, that the plain implementation is given."}
    )
    dtypes: list[str] = field(
        default_factory=lambda: ["bfloat16", "float32"],
        metadata={"help": "Of the target's weights and of what heads compute in; kinds are compared in the first."},
    )
    batch: int = field(default=1, metadata={"help": "Rows of a batch."})
    repeats: int = field(default=5, metadata={"help": "Timed steps of each implementation."})
    memory: bool = field(default=True, metadata={"help": "Measure memory, too (on a CPU in processes of their own)."})
    device: str | None = field(default=None, metadata={"help": "Device; none = cuda if there is one, else cpu."})
    threads: int = field(default=1, metadata={"help": "CPU threads."})
    peak_tflops: float | None = field(
        default=None,
        metadata={"help": "The device's dense peak in TFLOP/s, for model FLOPs utilisation; none = not told."},
    )
    json: str | None = field(default=None, metadata={"help": "Write environment and numbers to this JSON file."})
    markdown: str | None = field(default=None, metadata={"help": "Write the tables to this Markdown file."})
    plot: str | None = field(default=None, metadata={"help": "Draw speed and memory over the length into this file."})

    def __post_init__(self) -> None:
        for name in ("lengths", "kinds_length", "plain_up_to", "batch", "repeats", "threads"):
            values = getattr(self, name)
            if min([values] if isinstance(values, int) else values, default=1) < 1:
                raise ValueError(f"got --{name} {values}: give at least 1")
        if unknown := set(self.kinds) - HEAD_TYPES.keys():
            raise ValueError(f"got --kinds {', '.join(sorted(unknown))}; there are {', '.join(sorted(HEAD_TYPES))}")
        if unknown := set(self.dtypes) - {"float32", "bfloat16"}:
            raise ValueError(f"got --dtypes {', '.join(sorted(unknown))}; give float32, bfloat16 or both")


@dataclass(frozen=True)
class Line:
    """What was measured of one implementation of a cell; memory in bytes, None when it was not measured."""

    timing: Timing
    memory: int | None

    @property
    def cell(self) -> Cell:
        return self.timing.cell


def run(args: TrainingBenchmarkArguments, console: Console) -> str:
    torch.set_num_threads(args.threads)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    environment = {**describe_machine(torch.device(device)), **describe_program()}
    lines: list[Line] = []
    text = ""
    with Console(stderr=True).status("") as status:
        for cell in choose_cells(args, device):
            status.update(f"{cell.target}, {cell.kind}, {cell.length} tokens, {cell.dtype}")
            names = IMPLEMENTATIONS if cell.length <= args.plain_up_to else [OURS]
            for timing in time_steps(cell, names, args.repeats):
                memory = measure_memory(cell, timing.implementation) if args.memory else None
                lines.append(Line(timing, memory))
            text = write(args, lines, environment)  # what there is so far: the whole may take an hour
    for grid in make_grids(lines, args.peak_tflops):
        grid.print(console)
    if args.plot is not None:
        draw(Path(args.plot), lines)
    return text


def write(args: TrainingBenchmarkArguments, lines: Sequence[Line], environment: dict[str, Any]) -> str:
    """The files that are asked for; returns the Markdown."""
    if args.json is not None:
        cells = [{**asdict(line.timing), "memory": line.memory} for line in lines]
        content = {"environment": environment, "arguments": asdict(args), "cells": cells}
        write_text(Path(args.json), json.dumps(content, indent=1, allow_nan=False) + "\n")
    machine = ", ".join(f"{key} {value}" for key, value in environment.items() if key != "command" and value)
    tables = "\n\n".join(grid.to_markdown().strip() for grid in make_grids(lines, args.peak_tflops))
    text = f"```bash\n{environment['command']}\n```\n\n{machine}\n\n{tables}\n"
    if args.markdown is not None:
        write_text(Path(args.markdown), text)
    return text


def choose_cells(args: TrainingBenchmarkArguments, device: str) -> list[Cell]:
    """EAGLE-3 over all lengths, of the first target in every dtype, of further ones in the first; the other kinds at
    one length, of the first of both."""
    first, *further = args.targets
    pairs = [*((first, dtype) for dtype in args.dtypes), *((target, args.dtypes[0]) for target in further)]
    begin, *rest = [
        [Cell(target, FIRST_KIND, length, args.batch, dtype, device) for length in args.lengths]
        for target, dtype in pairs
    ]
    kinds = [Cell(first, kind, args.kinds_length, args.batch, args.dtypes[0], device) for kind in args.kinds]
    return list(dict.fromkeys([*begin, *kinds, *chain.from_iterable(rest)]))


def make_grids(lines: Sequence[Line], peak_tflops: float | None) -> list[Grid]:
    grids = []
    for target, dtype in dict.fromkeys((line.cell.target, line.cell.dtype) for line in lines):
        own = [line for line in lines if (line.cell.target, line.cell.dtype) == (target, dtype)]
        notes = [
            "speed: tokens/s of whole steps (median; ± the quartiles' distance over it); parts: shares of our step; "
            "memory: MiB at most during a step, beyond weights and optimizer states"
        ]
        if (exponent := fit_exponent(own)) is not None:
            notes.append(f"our memory at 2,048 tokens and more grows as length^{exponent:.2f}")
        columns = ["heads, tokens of a row", OURS, PLAIN, "×", PLAIN_SDPA, "×", *PARTS, "ours, MiB", "plain", "sdpa"]
        if peak_tflops is not None:
            columns.append("MFU")
        rows = [
            make_row([line for line in own if line.cell == cell], peak_tflops)
            for cell in dict.fromkeys(line.cell for line in own)
        ]
        grids.append(Grid(f"{Path(target).name}, {dtype}", columns, rows, notes))
    return grids


def make_row(lines: Sequence[Line], peak_tflops: float | None) -> list[str]:
    """One cell, all implementations."""
    by_name = {line.timing.implementation: line for line in lines}
    ours, cell = by_name[OURS].timing, lines[0].cell
    row = [f"{cell.kind}, {cell.length:,}", f"{ours.tokens_per_second:,.0f} ± {ours.spread:.0%}"]
    for name in (PLAIN, PLAIN_SDPA):
        other = by_name.get(name)
        row += ["", ""] if other is None else [
            f"{other.timing.tokens_per_second:,.0f}", f"{other.timing.total / ours.total:.2f}"
        ]  # fmt: skip
    row += [f"{part / sum(ours.parts):.1%}" for part in ours.parts]
    for name in IMPLEMENTATIONS:
        memory = by_name[name].memory if name in by_name else None
        row.append("" if memory is None else f"{memory / MIB:,.0f}")
    if peak_tflops is not None:
        row.append(f"{ours.flops / ours.total / peak_tflops / 1e12:.1%}")
    return row


def fit_exponent(lines: Sequence[Line]) -> float | None:
    """Of our memory over the length, by least squares between logarithms; None for fewer than two lengths."""
    points = [
        (line.cell.length, line.memory)
        for line in lines
        if line.timing.implementation == OURS
        and line.cell.kind == FIRST_KIND
        and line.cell.length >= 2048
        and line.memory
    ]
    if len(points) < 2:
        return None
    x, y = torch.tensor(points, dtype=torch.float64).log().T
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def draw(path: Path, lines: Sequence[Line]) -> None:
    """EAGLE-3's speed and memory over the length, one curve for each implementation."""
    plt = load_pyplot()
    groups = list(dict.fromkeys((line.cell.target, line.cell.dtype) for line in lines if line.cell.kind == FIRST_KIND))
    figure, axes = plt.subplots(2, len(groups), figsize=(4 * len(groups), 7), squeeze=False, layout="constrained")
    for column, (target, dtype) in enumerate(groups):
        for name in IMPLEMENTATIONS:
            own = [
                line
                for line in lines
                if (line.cell.target, line.cell.dtype, line.cell.kind) == (target, dtype, FIRST_KIND)
                and line.timing.implementation == name
            ]
            lengths = [line.cell.length for line in own]
            axes[0][column].plot(lengths, [line.timing.tokens_per_second for line in own], "o-", label=name)
            known = [(line.cell.length, line.memory / MIB) for line in own if line.memory is not None]
            axes[1][column].plot([x for x, _ in known], [y for _, y in known], "o-", label=name)
        axes[0][column].set(title=f"{Path(target).name}, {dtype}", xscale="log", ylabel="tokens/s", ylim=(0, None))
        axes[1][column].set(xscale="log", yscale="log", xlabel="tokens of a row", ylabel="memory of a step, MiB")
        ticks = sorted({line.cell.length for line in lines if line.cell.kind == FIRST_KIND})
        for row in (0, 1):
            axes[row][column].grid(alpha=0.3)
            axes[row][column].set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes[row][column].minorticks_off()
    axes[0][0].legend()
    save_figure(figure, path)


def main() -> None:
    parser = HfArgumentParser(TrainingBenchmarkArguments, description=__doc__.partition("\n")[0])  # type: ignore[arg-type]
    try:
        (args,) = parser.parse_args_into_dataclasses()
        run(args, Console(width=None if sys.stdout.isatty() else 180))
    except (ValueError, OSError) as error:
        sys.exit(f"training_speed.py: {error}")


if __name__ == "__main__":
    main()
