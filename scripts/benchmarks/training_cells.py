"""One cell of `training_speed.py`: a target of some shape, heads of some kind, rows of some length; what a training
step of each implementation takes, in time by its parts and in memory.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

# First on the path: another distribution also ships a package named `inference`.
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from heads import DraftHeads, create_heads
from inference import Target
from scripts.benchmarks.memory_cells import read_resident
from scripts.benchmarks.plain_training import plain_loss, run_target
from training.data.collation import ConversationCollator, find_documents
from training.features.sources import OnlineFeatures
from training.losses.draft_loss import draft_loss
from training.losses.teacher import compute_teacher

OURS, PLAIN, PLAIN_SDPA = "ours", "plain", "plain, sdpa"
PARTS = ("data", "target", "draft", "optimizer")
STEP_DECAY, CLIP = 0.8, 0.5
# Settings of kinds of heads that are not their defaults, and the kinds that score a draft vocabulary.
OVERRIDES: dict[str, dict[str, Any]] = {"eagle3": {"ttt_steps": 7}}
WITH_DRAFT_VOCABULARY = ("eagle3", "parallel")

_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Targets of random weights: name -> settings of a Llama, and how large a draft vocabulary of EAGLE-3's kind is.
SHAPES: dict[str, tuple[dict[str, Any], int | None]] = {
    "wide": ({**_SMALL, "num_hidden_layers": 8, "head_dim": 64, "vocab_size": 32768}, None),
    "1b": (
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
        32000,
    ),
    "8b": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
        32000,
    ),
}


@dataclass(frozen=True)
class Cell:
    """target: a key of `SHAPES`, a folder or a hub id. length: tokens of a row; batch: rows. dtype: of the target's
    weights, and what the heads compute in."""

    target: str
    kind: str
    length: int
    batch: int
    dtype: str
    device: str
    seed: int = 0


class Bench:
    """A cell made ready: target, heads, optimizer and rows, the same ones each time."""

    def __init__(self, cell: Cell) -> None:
        torch.manual_seed(cell.seed)
        self.cell = cell
        self.device = torch.device(cell.device)
        dtype = getattr(torch, cell.dtype)
        settings, draft_size = SHAPES.get(cell.target, (None, None))
        positions = max(cell.length, 2048)
        if settings is None:
            config = AutoConfig.from_pretrained(cell.target)
            config.max_position_embeddings = max(config.max_position_embeddings, positions)
            model = AutoModelForCausalLM.from_pretrained(cell.target, config=config, dtype=dtype).to(self.device)
        else:
            with self.device:
                llama = LlamaConfig(max_position_embeddings=positions, tie_word_embeddings=True, **settings)
                model = AutoModelForCausalLM.from_config(llama, dtype=dtype)
        self.target = Target(model.requires_grad_(False).eval())
        overrides = dict(OVERRIDES.get(cell.kind, {}))
        if draft_size and cell.kind in WITH_DRAFT_VOCABULARY:
            overrides["draft_vocab_size"] = draft_size
        self.heads: DraftHeads = create_heads(cell.kind, self.target, **overrides).train()
        if self.heads.wants_token_counts:
            self.heads.fit_vocabulary(torch.arange(self.target.vocab_size))
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), lr=0.0)  # every step is the first
        self.collator = ConversationCollator(0)

    def make_rows(self, length: int) -> list[dict[str, list[int]]]:
        """Rows of random tokens, of which the last three quarters have a loss."""
        generator = torch.Generator().manual_seed(self.cell.seed)
        tokens = torch.randint(self.target.vocab_size, (self.cell.batch, length), generator=generator)
        mask = [int(place >= length // 4) for place in range(length)]
        return [{"input_ids": row, "loss_mask": mask} for row in tokens.tolist()]

    def step(self, implementation: str, rows: list[dict[str, list[int]]], clock: Callable[[], float]) -> StepTimes:
        torch.manual_seed(self.cell.seed)  # of noise and drawn anchors
        marks = [clock()]
        batch = {name: value.to(self.device) for name, value in self.collator(rows).items()}
        marks.append(clock())
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cell.dtype == "bfloat16"):
            run = self._run_ours if implementation == OURS else self._run_plainly
            loss = run(batch, implementation, lambda: marks.append(clock()))
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(clock())
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(clock())
        return StepTimes([end - start for start, end in pairwise(marks)], float(loss.detach()))

    def _run_ours(self, batch: dict[str, Tensor], _: str, has_read_target: Callable[[], None]) -> Tensor:
        states = OnlineFeatures(self.target, self.heads.feature_layers)(batch)
        has_read_target()
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
        )
        loss: Tensor = output.loss
        return loss

    def _run_plainly(
        self, batch: dict[str, Tensor], implementation: str, has_read_target: Callable[[], None]
    ) -> Tensor:
        states = run_target(self.target, self.heads, batch)
        has_read_target()
        use_sdpa = implementation == PLAIN_SDPA
        return plain_loss(self.heads, states, batch, step_decay=STEP_DECAY, use_sdpa=use_sdpa)


@dataclass(frozen=True)
class StepTimes:
    """parts: seconds of data, target, draft (forward and backward pass, with the losses) and optimizer."""

    parts: list[float]
    loss: float

    @property
    def total(self) -> float:
        return sum(self.parts)


@dataclass(frozen=True)
class Timing:
    """Medians over the repeats: parts in seconds, in the order of `PARTS`. spread: of whole steps, as the distance of
    the quartiles over the median. loss: of the first step. flops: of its products with weights, attention left out."""

    cell: Cell
    implementation: str
    parts: list[float]
    total: float
    spread: float
    loss: float
    flops: int

    @property
    def tokens_per_second(self) -> float:
        return self.cell.batch * self.cell.length / self.total


class ProductCounter(TorchDispatchMode):
    """Counts floating-point operations of products of two matrices. torch's FlopCounterMode cannot: its hooks do not
    work within `torch.autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            one, other = args[-2:]
            self.flops += 2 * one.shape[0] * one.shape[1] * other.shape[1]
        return func(*args, **(kwargs or {}))


def time_steps(cell: Cell, implementations: list[str], repeats: int) -> list[Timing]:
    """Steps of all implementations in turn, each first once for nothing. On a CPU the clock is the process's own time,
    which neighbours on the machine disturb less.

    Raises:
        AssertionError: the losses of two implementations differ.
    """
    bench = Bench(cell)
    rows = bench.make_rows(cell.length)
    clock = time.process_time if bench.device.type == "cpu" else _synchronised(bench.device)
    first, flops = {}, {}
    for name in implementations:
        with ProductCounter() as counter:
            first[name] = bench.step(name, rows, clock).loss
        flops[name] = counter.flops
    limit = 1e-4 if cell.dtype == "float32" else 1e-2
    assert all(abs(loss / first[OURS] - 1) < limit for loss in first.values()), f"{cell}: the losses differ: {first}"
    found: dict[str, list[StepTimes]] = {name: [] for name in implementations}
    for repeat in range(repeats):
        for place in range(len(implementations)):
            name = implementations[(place + repeat) % len(implementations)]
            found[name].append(bench.step(name, rows, clock))
    timings = []
    for name, steps in found.items():
        totals = torch.tensor([step.total for step in steps], dtype=torch.float64)
        low, total, high = totals.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        parts = torch.tensor([step.parts for step in steps], dtype=torch.float64).median(0).values.tolist()
        timings.append(Timing(cell, name, parts, total, (high - low) / total, first[name], flops[name]))
    return timings


def _synchronised(device: torch.device) -> Callable[[], float]:
    def clock() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return clock


def measure_memory(cell: Cell, implementation: str) -> int:
    """Bytes that a step holds at most, beyond what lives between steps: weights, gradients' and optimizer's states.

    On a CPU that is the resident memory of a process of its own, whose malloc gives large blocks back when they are
    freed.
    """
    if cell.device != "cpu":
        return _grow(cell, implementation)
    malloc = patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)})
    with malloc, multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grow, (cell, implementation))


def _grow(cell: Cell, implementation: str) -> int:
    torch.set_num_threads(1)
    bench = Bench(cell)
    bench.step(implementation, bench.make_rows(64), time.perf_counter)  # code, tables, the optimizer's states
    rows = bench.make_rows(cell.length)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
        bench.step(implementation, rows, time.perf_counter)
        return torch.cuda.max_memory_allocated(bench.device) - before
    before = read_resident("VmRSS")
    if before:
        Path("/proc/self/clear_refs").write_text("5")  # the largest size begins anew
    bench.step(implementation, rows, time.perf_counter)
    return read_resident("VmHWM") - before
