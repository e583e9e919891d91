"""Measures training steps beside a plain implementation: tokens per second, parts of a step, peak memory.

    python scripts/benchmarks/training/speed.py --lengths 512 2048 --output outputs/training
    python scripts/benchmarks/training/speed.py --kinds eagle3 --lengths 512 2048 --offline 1 8 --output outputs/offline

The plain implementation (`plain.py`) uses dense tensors, with the same heads, batch and loss (asserted). Steps
of all implementations take turns in one process. A target folder with only a config.json gets random weights.

With --offline: the time that epochs on stored features wait for batches and states, beside the time of the draft.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

import torch
from accelerate.utils import send_to_device
from rich.console import Console
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.heads import HEAD_TYPES, DraftHeads, create_heads
from draftsmith.inference import Target
from draftsmith.scripts.benchmarks.scripted.counting import reduce_vocabulary
from draftsmith.scripts.benchmarks.training.plain import plain_loss, run_target
from draftsmith.scripts.measuring.environment import describe_machine, describe_program
from draftsmith.scripts.measuring.operations import count_operations
from draftsmith.scripts.measuring.table import Grid
from draftsmith.scripts.shared.clock import read_clock
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.collation import ConversationCollator, find_documents
from draftsmith.training.data.options import option
from draftsmith.training.features.sources import (
    FeatureSource,
    HybridFeatures,
    OnlineFeatures,
    StoredFeatures,
    TextsCollator,
    look_ahead,
)
from draftsmith.training.features.store import FeatureStore, StoreSettings, name_tensors, write_settings
from draftsmith.training.features.target_identity import identify_target
from draftsmith.training.losses.draft_loss import draft_loss
from draftsmith.training.losses.teacher import compute_teacher
from draftsmith.training.options.command_line import ProgramParser
from draftsmith.training.options.one_line_errors import one_line_errors

MIB = 1 << 20
OURS, PLAIN, PLAIN_SDPA = IMPLEMENTATIONS = ("ours", "plain", "plain, sdpa")
NUM_BATCHES = 4  # of an epoch on stored features
PARTS = ("data", "target", "draft", "optimizer")
STEP_DECAY, CLIP = 0.8, 0.5
OVERRIDES: dict[str, dict[str, Any]] = {"eagle3": {"ttt_steps": 7}}  # the authors' number of steps


@dataclass
class TrainingSpeedArguments:
    target: str = option(default="examples/chat-13m", help="Target: a folder or hub id.")
    kinds: list[str] = option(default_factory=lambda: sorted(HEAD_TYPES), help="Kinds of heads.")
    lengths: list[int] = option(default_factory=lambda: [2048], help="Row lengths in tokens.")
    plain_up_to: int = option(default=2048, help="Longest row, in tokens, that the plain implementation also runs.")
    dtype: str = option(
        default="bfloat16",
        help="Dtype of the target's weights and of the computation.",
        metadata={"choices": ["float32", "bfloat16"]},
    )
    batch: int = option(default=1, help="Rows per batch.")
    repeats: int = option(default=5, help="Timed steps of each implementation.")
    device: str | None = option(default=None, help="Device; none = cuda if there is one, else cpu.")
    threads: int = option(default=1, help="CPU threads.")
    offline: list[int] = option(
        default_factory=list,
        help="Measure epochs on stored features instead, with rows of so many documents each: 1 8.",
    )
    output: str = option(default="outputs/training", help="Write OUTPUT.md and OUTPUT.json.")

    def __post_init__(self) -> None:
        for name in ("lengths", "plain_up_to", "batch", "repeats", "threads", "offline"):
            values = getattr(self, name)
            if min([values] if isinstance(values, int) else values, default=1) < 1:
                raise ValueError(f"got --{name} {values}: give at least 1")
        if unknown := set(self.kinds) - HEAD_TYPES.keys():
            raise ValueError(f"got --kinds {', '.join(sorted(unknown))}; there are {', '.join(sorted(HEAD_TYPES))}")


@dataclass(frozen=True)
class Cell:
    """One measurement. length: tokens of a row; batch: rows; dtype: of the target's weights and the computation."""

    target: str
    kind: str
    length: int
    batch: int
    dtype: str
    device: str


@dataclass(frozen=True)
class StepTimes:
    """parts: seconds of data, target, draft (forward and backward pass, with the losses) and optimizer."""

    parts: list[float]
    loss: float


@dataclass(frozen=True)
class Timing:
    """Medians over the repeats, in seconds. spread: the distance of the quartiles of whole steps over the median.
    memory: the most bytes that a step allocates; weights and optimizer states do not count. operations: of a step."""

    parts: list[float]
    total: float
    spread: float
    memory: int
    operations: int


class Bench:
    """Target, heads, optimizer and rows of a cell, the same ones each time."""

    def __init__(self, cell: Cell) -> None:
        torch.manual_seed(0)
        self.cell, self.device = cell, torch.device(cell.device)
        self.target = Target(load_model(cell, self.device).requires_grad_(False).eval())
        overrides = OVERRIDES.get(cell.kind, {}) | reduce_vocabulary(cell.kind, self.target)
        self.heads: DraftHeads = create_heads(cell.kind, self.target, **overrides).train()
        if self.heads.wants_token_counts:
            self.heads.fit_vocabulary(torch.arange(self.target.vocab_size))
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), lr=0.0)  # every step starts from the same weights
        self.collator = ConversationCollator(0)

    def make_rows(self, length: int) -> list[dict[str, list[int]]]:
        """Rows of random tokens; the last three quarters have a loss."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.target.vocab_size, (self.cell.batch, length), generator=generator)
        mask = [int(place >= length // 4) for place in range(length)]
        return [{"input_ids": row, "loss_mask": mask} for row in tokens.tolist()]

    def step(self, implementation: str, rows: list[dict[str, list[int]]], clock: Callable[[], float]) -> StepTimes:
        marks = [clock()]
        batch = send_to_device(self.collator(rows), self.device)
        marks.append(clock())
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cell.dtype == "bfloat16"):
            if implementation == OURS:
                states = OnlineFeatures(self.target, self.heads.feature_layers)(batch)
                marks.append(clock())
                loss = self._our_loss(states, batch)
            else:
                plain_states = run_target(self.target, self.heads, batch)
                marks.append(clock())
                use_sdpa = implementation == PLAIN_SDPA
                loss = plain_loss(self.heads, plain_states, batch, step_decay=STEP_DECAY, use_sdpa=use_sdpa)
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(clock())
        self._optimize()
        marks.append(clock())
        return StepTimes([end - start for start, end in pairwise(marks)], float(loss.detach()))

    def run_epoch(self, batches: Iterable[dict[str, Any]], source: FeatureSource) -> float:
        """Our steps on the states of a source; returns their speed over that of the draft alone: the share of the time
        that is not spent on waiting for batches and states."""
        clock, left = partial(read_clock, self.device), iter(batches)
        start, waited = clock(), 0.0
        while True:
            asked = clock()
            if (batch := next(left, None)) is None:
                return 1 - waited / (clock() - start)
            states = source(batch)
            waited += clock() - asked
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cell.dtype == "bfloat16"):
                loss = self._our_loss(states, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimize()

    def _optimize(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _our_loss(self, states: Any, batch: dict[str, Any]) -> Tensor:
        ids, loss_mask, loss_type = batch["input_ids"], batch["loss_mask"], "distillation"
        teacher = compute_teacher(
            self.target, states.last_hidden, ids, loss_mask, self.heads.draft_token_ids, loss_type=loss_type
        )
        output = self.heads(
            states.features,
            ids,
            loss_fn=lambda steps: draft_loss(steps, teacher, loss_mask, loss_type=loss_type, step_decay=STEP_DECAY),
            loss_mask=loss_mask,
            document_ids=find_documents(batch),
            token_seeds=batch["token_keys"],
        )
        loss: Tensor = output.loss
        return loss


def load_model(cell: Cell, device: torch.device) -> Any:
    """The target's model, with positions for the cell's rows; random weights if its folder has only a config."""
    dtype = getattr(torch, cell.dtype)
    config = AutoConfig.from_pretrained(cell.target)
    config.max_position_embeddings = max(config.max_position_embeddings, cell.length)
    if Path(cell.target).is_dir() and not any(Path(cell.target).glob("*.safetensors")):
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(cell.target, config=config, dtype=dtype).to(device)


def measure_cell(cell: Cell, implementations: Sequence[str], repeats: int) -> dict[str, Timing]:
    """Times steps of all implementations in turns, after one step of each that is not timed. On a CPU the clock is the
    process's own time, which other work on the machine disturbs less.

    Raises:
        AssertionError: the losses of two implementations differ.
    """
    bench = Bench(cell)
    rows = bench.make_rows(cell.length)
    on_device = partial(read_clock, bench.device)
    clock: Callable[[], float] = time.process_time if bench.device.type == "cpu" else on_device
    first = {name: bench.step(name, rows, clock).loss for name in implementations}
    limit = 1e-4 if cell.dtype == "float32" else 1e-2
    assert all(abs(loss / first[OURS] - 1) < limit for loss in first.values()), f"{cell}: the losses differ: {first}"
    found: dict[str, list[list[float]]] = {name: [] for name in implementations}
    for repeat in range(repeats):
        for place in range(len(implementations)):
            name = implementations[(place + repeat) % len(implementations)]
            found[name].append(bench.step(name, rows, clock).parts)
    timings = {}
    for name, steps in found.items():
        parts = torch.tensor(steps, dtype=torch.float64)
        low, total, high = parts.sum(1).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        peak = measure_peak(bench, name, rows)
        with count_operations() as counter:
            bench.step(name, rows, clock)
        operations = counter.get_total_flops()
        timings[name] = Timing(parts.median(0).values.tolist(), total, (high - low) / total, peak, operations)
    return timings


def measure_offline(cell: Cell, num_documents: int, repeats: int) -> list[float]:
    """Speed of epochs on stored features over that of the draft alone: read ahead, and read when needed. Medians of
    epochs that take turns."""
    bench, size = Bench(cell), cell.length // num_documents
    shape = (NUM_BATCHES, cell.batch, size * num_documents)
    tokens = torch.randint(bench.target.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    fixed = {"loss_mask": ([0] * (size // 4) + [1] * (size - size // 4)) * num_documents}
    if num_documents > 1:
        fixed["document_lengths"] = [size] * num_documents
    batches = [[{"input_ids": row, **fixed} for row in rows] for rows in tokens.tolist()]
    collate, layers = TextsCollator(bench.collator), bench.heads.feature_layers
    speeds: list[list[float]] = []
    with TemporaryDirectory() as folder:
        names, identity = name_tensors(layers, bench.target.num_layers), identify_target(bench.target, cell.target)
        write_settings(Path(folder), StoreSettings(identity, names))
        writing = HybridFeatures(OnlineFeatures(bench.target, layers), FeatureStore(Path(folder)))
        for batch in map(collate, batches):
            writing(batch)
        writing.flush()
        stored = StoredFeatures(bench.target, layers, FeatureStore(Path(folder)))
        bench.run_epoch(map(collate, batches[:1]), stored)
        for _ in range(repeats):
            ahead = bench.run_epoch(look_ahead(map(collate, batches), stored), stored)
            speeds.append([ahead, bench.run_epoch(map(collate, batches), stored)])
    medians: list[float] = torch.tensor(speeds).median(0).values.tolist()
    return medians


def run_offline(args: TrainingSpeedArguments, device: str, heading: str, console: Console) -> None:
    """Measures epochs on stored features, and writes the table."""
    cells = []
    for kind, length, documents in product(args.kinds, args.lengths, args.offline):
        cell = Cell(args.target, kind, length, args.batch, args.dtype, device)
        speeds = measure_offline(cell, documents, args.repeats)
        cells.append([f"{kind}, {length:,}, {documents}", *(f"{speed:.4f}" for speed in speeds)])
    columns = ["heads, tokens of a row, documents of a row", "read ahead", "read when needed"]
    notes = [f"Medians of epochs of {NUM_BATCHES} steps: their speed over that of the draft alone."]
    grid = Grid(f"Stored features: {Path(args.target).name}, {args.dtype}, batch {args.batch}", columns, cells, notes)
    write_text(Path(f"{args.output}.md"), heading + grid.to_markdown())
    grid.print(console)
    console.print(f"wrote {args.output}.md", markup=False, highlight=False)


def measure_peak(bench: Bench, implementation: str, rows: list[dict[str, list[int]]]) -> int:
    """The most bytes that torch's allocator hands out during a step, beyond those in use before it."""
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
        bench.step(implementation, rows, time.perf_counter)
        return torch.cuda.max_memory_allocated(bench.device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        bench.step(implementation, rows, time.perf_counter)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(sizes, default=0)


def run(args: TrainingSpeedArguments, console: Console) -> None:
    """Measures every kind at every length; the files are written after each of them, since all may take an hour."""
    torch.set_num_threads(args.threads)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    environment = {**describe_machine(torch.device(device)), **describe_program()}
    machine = ", ".join(f"{key} {value}" for key, value in environment.items() if key != "command" and value)
    heading = f"```bash\n{environment['command']}\n```\n\n{machine}\n\n"
    if args.offline:
        run_offline(args, device, heading, console)
        return
    measured: list[tuple[Cell, dict[str, Timing]]] = []
    with Console(stderr=True).status("") as status:
        for kind, length in product(args.kinds, args.lengths):
            status.update(f"{kind}, {length} tokens")
            cell = Cell(args.target, kind, length, args.batch, args.dtype, device)
            names = IMPLEMENTATIONS if length <= args.plain_up_to else (OURS,)
            measured.append((cell, measure_cell(cell, names, args.repeats)))
            cells = [{**asdict(cell), **{name: asdict(one) for name, one in found.items()}} for cell, found in measured]
            content = {"environment": environment, "cells": cells}
            write_text(Path(f"{args.output}.json"), json.dumps(content, indent=1, allow_nan=False) + "\n")
            table = make_grid(measured).to_markdown()
            write_text(Path(f"{args.output}.md"), heading + table)
    make_grid(measured).print(console)
    console.print(f"wrote {args.output}.md and {args.output}.json", markup=False, highlight=False)


def make_grid(measured: Sequence[tuple[Cell, dict[str, Timing]]]) -> Grid:
    cells = []
    for cell, found in measured:
        ours = found[OURS]
        tokens_per_second = cell.batch * cell.length / ours.total
        ratios = [f"{found[name].total / ours.total:.2f}" if name in found else "–" for name in IMPLEMENTATIONS[1:]]
        parts = [f"{part / sum(ours.parts):.1%}" for part in ours.parts]
        memory = [f"{found[name].memory / MIB:,.0f}" if name in found else "–" for name in IMPLEMENTATIONS]
        speed = f"{tokens_per_second:,.0f} ± {ours.spread:.0%}"
        cells.append([f"{cell.kind}, {cell.length:,}", speed, *ratios, *parts, *memory])
    columns = ["heads, tokens of a row", "tokens/s", *(f"× {name}" for name in IMPLEMENTATIONS[1:]), *PARTS]
    columns += [f"{name}, MiB" for name in IMPLEMENTATIONS]
    notes = [
        "tokens/s: median of whole steps ± the quartiles' distance. ×: speed over the plain implementation, without "
        "and with scaled_dot_product_attention. Parts: shares of our step. MiB: a step's peak; weights do not count."
    ]
    first = measured[0][0]
    return Grid(f"Training steps: {Path(first.target).name}, {first.dtype}, batch {first.batch}", columns, cells, notes)


def main() -> None:
    with one_line_errors("training/speed.py"):
        (args,) = ProgramParser([TrainingSpeedArguments], doc=__doc__).read()
        run(args, Console(width=None if sys.stdout.isatty() else 180))


if __name__ == "__main__":
    main()
