"""Measures what decoding holds in memory at most, split into what it consists of; writes JSON and a Markdown table.

    python scripts/benchmarks/memory.py --json outputs/memory.json --markdown outputs/memory.md

Nothing is timed, and the numbers are the same on every machine with the same libraries and as many threads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich.console import Console
from transformers import HfArgumentParser

from scripts.benchmarks.environment import describe_environment
from scripts.benchmarks.memory_cells import (
    RANDOM_SHAPE,
    Cell,
    Check,
    Scene,
    build_wide_target,
    check_rulers,
    measure_ours,
    measure_scenes,
    measure_transformers,
)
from scripts.benchmarks.render import Grid
from scripts.benchmarks.report import write_text
from scripts.model_loading import load_heads, load_target

MIB = 1 << 20


@dataclass
class MemoryArguments:
    target: str = field(default="examples/chat-13m", metadata={"help": "Folder or hub id of the target."})
    heads: list[str] = field(
        default_factory=lambda: [f"examples/heads/{kind}" for kind in ("medusa", "eagle3", "mtp")],
        metadata={"help": "Folders or hub ids of draft heads."},
    )
    batch: list[int] = field(default_factory=lambda: [1, 8], metadata={"help": "Rows of a batch."})
    prompt: list[int] = field(default_factory=lambda: [64, 512, 760], metadata={"help": "Tokens of every prompt."})
    new: list[int] = field(
        default_factory=lambda: [8, 32, 256],
        metadata={"help": "New tokens; all but the first number with the smallest batch of the shortest prompt only."},
    )
    long_prompt: list[int] = field(
        default_factory=lambda: [512, 1024, 2048, 4096, 8192],
        metadata={"help": "Tokens of the prompts of a random target with untrained heads."},
    )
    dtype: str = field(default="float32", metadata={"help": "Weights of target and heads (auto = as they were saved)."})
    device: str | None = field(default=None, metadata={"help": "Device; none = cuda if there is one, else cpu."})
    threads: int = field(default=1, metadata={"help": "CPU threads."})
    json: str | None = field(default=None, metadata={"help": "Write environment and numbers to this JSON file."})
    markdown: str | None = field(default=None, metadata={"help": "Write the tables to this Markdown file."})

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "new", "long_prompt", "threads"):
            values = getattr(self, name)
            if min([values] if isinstance(values, int) else values, default=1) < 1:
                raise ValueError(f"got --{name} {values}: give at least 1")


def run(args: MemoryArguments, console: Console) -> str:
    torch.set_num_threads(args.threads)
    target, _ = load_target(args.target, dtype=args.dtype, device=args.device)
    drafters = {Path(name).name: load_heads(name, target) for name in args.heads}
    cells: list[Cell] = []
    with Console(stderr=True).status("") as status:
        for batch in args.batch:
            for prompt in args.prompt:
                is_smallest = prompt == min(args.prompt) and batch == min(args.batch)
                for new in args.new if is_smallest else args.new[:1]:
                    status.update(f"batch {batch}, prompts of {prompt}, {new} new tokens")
                    for is_static in (False, True):
                        cells.append(measure_transformers(target, batch, prompt, new, is_static=is_static))
                    for name, drafter in {"ours, plain": None, **drafters}.items():
                        cells.append(measure_ours(name, target, drafter, batch, prompt, new))
        wide, heads = build_wide_target(max([*args.long_prompt, 2048]) + 256, target.device)
        longs: list[Cell] = []
        for prompt in args.long_prompt:
            status.update(f"prompts of {prompt}")
            longs.append(measure_transformers(wide, 1, prompt, 8, is_static=False))
            longs.append(measure_ours("ours, plain", wide, None, 1, prompt, 8))
            longs.append(measure_ours("ours, eagle3", wide, heads, 1, prompt, 8))
        status.update("calls behind one another")
        scenes = measure_scenes(wide, heads)
        is_cpu = target.device.type == "cpu"
        checks = [check_rulers(batch, prompt) for batch, prompt in ((1, 2048), (4, 2048))] if is_cpu else []
    environment = describe_environment(target, None, random_target=RANDOM_SHAPE)
    environment.pop("batch")
    grids = [
        make_grid(f"{Path(args.target).name}, {environment['dtype']}", cells),
        make_grid(f"a random target ({', '.join(f'{k} {v}' for k, v in RANDOM_SHAPE.items())}), float32", longs),
        make_scene_grid(scenes),
        *([make_check_grid(checks)] if checks else []),
    ]
    for grid in grids:
        grid.print(console)
    tables = "\n\n".join(grid.to_markdown().strip() for grid in grids)
    command = f"```bash\n{environment['command']}\n```"
    table = f"What each column is, and why: [memory.md](../memory.md).\n\n{command}\n\n{tables}\n"
    if args.json is not None:
        content: dict[str, Any] = {"environment": environment}
        for name, rows in {"cells": cells, "long_prompts": longs}.items():
            content[name] = [{**asdict(row), "peak": row.peak} for row in rows]
        content |= {"scenes": [asdict(scene) for scene in scenes], "checks": [asdict(check) for check in checks]}
        write_text(Path(args.json), json.dumps(content, indent=1, allow_nan=False) + "\n")
    if args.markdown is not None:
        write_text(Path(args.markdown), table)
    return table


def make_grid(title: str, cells: Sequence[Cell]) -> Grid:
    columns = ["decoder", "batch", "prompt", "new", "target", "heads", "cache", "state", "rest", "peak", "left"]
    rows = [
        [cell.contender, str(cell.batch), str(cell.prompt), str(cell.new)]
        + [_mib(getattr(cell, name)) for name in columns[4:]]
        for cell in cells
    ]
    return Grid(title, columns, rows, ["MiB; left: alive behind the call, besides target and heads"])


def make_scene_grid(scenes: Sequence[Scene]) -> Grid:
    rows = [[scene.name, *(_mib(x) for x in (scene.before, scene.after, scene.peak, scene.left))] for scene in scenes]
    columns = ["what is done with a decoder that has decoded", "cache before", "cache after", "peak", "left"]
    return Grid("the random target with heads", columns, rows, ["MiB; peak and left without target and heads"])


def make_check_grid(checks: Sequence[Check]) -> Grid:
    rows = [[str(c.batch), str(c.prompt), *(_mib(x) for x in (c.tracked, c.profiled, c.resident))] for c in checks]
    columns = ["batch", "prompt", "tensors followed", "torch.profiler", "resident memory of a process"]
    return Grid("one call's peak beyond target and heads, by three rulers", columns, rows, ["MiB"])


def _mib(size: int) -> str:
    return f"{size / MIB:.2f}"


def main() -> None:
    parser = HfArgumentParser(MemoryArguments, description=__doc__.partition("\n")[0])  # type: ignore[arg-type]
    try:
        (args,) = parser.parse_args_into_dataclasses()
        run(args, Console(width=None if sys.stdout.isatty() else 150))
    except (ValueError, OSError) as error:
        sys.exit(f"memory.py: {error}")


if __name__ == "__main__":
    main()
