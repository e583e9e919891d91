"""`--dry_run`: a few real optimizer steps on the longest rows, and a checkpoint, before the run itself.

Whatever would fail after hours fails here after a minute: the memory of the largest batch, the backward pass, the
optimizer, the files of a checkpoint. The checkpoint goes into a temporary folder; `output_dir` stays as it is.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.utils import broadcast_object_list
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from draftsmith.training.data.set_statistics import row_lengths
from draftsmith.training.run.joint_trainer import JointTrainer
from draftsmith.training.run.outcome import PreparedRun
from draftsmith.training.run.progress import describe_time
from draftsmith.training.run.trainer import HeadsTrainer

NUM_STEPS = 2  # the first step warms up and is not timed
STREAMED_ROWS = 512  # a stream has no end, so its first rows stand for all of them


@dataclass(frozen=True)
class SmokeRun:
    """The cost of steps on the longest rows, for one process.

    Attributes:
        row_lengths: tokens of the rows of one step (all processes together).
        step_seconds: the fastest timed optimizer step.
        peak_bytes: of the GPU, or without a GPU of the whole process.
        num_steps: optimizer steps that the run itself will take.
    """

    row_lengths: list[int]
    step_seconds: float
    peak_bytes: int
    checkpoint_bytes: int
    num_steps: int

    def describe(self) -> str:
        longest = describe_time(self.num_steps * self.step_seconds)
        return (
            f"dry run passed: {NUM_STEPS} optimizer steps on the longest rows, and a checkpoint\n"
            f"  longest rows      {len(self.row_lengths)} rows of up to {max(self.row_lengths):,} tokens per step\n"
            f"  seconds per step  {self.step_seconds:.3g}\n"
            f"  peak memory       {self.peak_bytes / 2**30:.2f} GiB per process\n"
            f"  a checkpoint      {self.checkpoint_bytes / 2**20:,.1f} MiB\n"
            f"  the run           {self.num_steps:,} steps, at most {longest} without evaluations\n"
            "Start the run with the same command without --dry_run."
        )


def smoke_run(run: PreparedRun) -> SmokeRun:
    """Trains `NUM_STEPS` steps on the longest rows and writes a checkpoint into a temporary folder. Collective."""
    trainer = run.trainer
    num_steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
    rows = _known_rows(trainer)
    lengths = row_lengths(rows)
    args = trainer.args
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    longest = sorted(range(len(rows)), key=lambda row: -lengths[row])[:per_step]
    clock = _StepClock()
    with _temporary_folder(run) as folder:
        _make_short(trainer, folder)
        trainer.train_dataset = rows.select(longest * NUM_STEPS)
        trainer.add_callback(clock)
        trainer.train()
        checkpoint = folder / f"checkpoint-{NUM_STEPS}"
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    return SmokeRun([lengths[row] for row in longest], min(clock.seconds[1:]), _peak_bytes(), size, num_steps)


def _known_rows(trainer: HeadsTrainer) -> datasets.Dataset:
    rows: Any = trainer.train_dataset
    if isinstance(rows, datasets.Dataset):
        return rows
    return datasets.Dataset.from_list(list(islice(rows, STREAMED_ROWS)))


def _make_short(trainer: HeadsTrainer, folder: Path) -> None:
    """Steps, and one checkpoint at their end; nothing is evaluated, logged or uploaded."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": NUM_STEPS,
        "save_strategy": SaveStrategy.STEPS,
        "save_steps": NUM_STEPS,
        "eval_strategy": IntervalStrategy.NO,
        "eval_on_start": False,
        "logging_strategy": IntervalStrategy.NO,
        "train_sampling_strategy": "sequential",
        "load_best_model_at_end": False,
        "push_to_hub": False,
    }
    for name, value in settings.items():
        setattr(trainer.args, name, value)
    if isinstance(trainer, JointTrainer):  # steps of heads and adapters need the most memory
        trainer.joint.args = replace(trainer.joint.args, heads_warmup_steps=0)
    for callback in [*trainer.callback_handler.callbacks]:
        is_dashboard = type(callback).__module__.startswith("transformers.integrations")
        if is_dashboard or isinstance(callback, EarlyStoppingCallback):
            trainer.remove_callback(callback)


class _StepClock(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Seconds of each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(-time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[-1] += time.perf_counter()


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        import psutil  # type: ignore[import-untyped, unused-ignore]

        return int(psutil.Process().memory_info().peak_wset)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts kibibytes


@contextmanager
def _temporary_folder(run: PreparedRun) -> Iterator[Path]:
    """One folder for all processes of a machine; an `output_dir` that this run has made goes with it."""
    names = [tempfile.mkdtemp(prefix="dry-run-") if run.trainer.args.process_index == 0 else ""]
    broadcast_object_list(names)
    folder = Path(names[0])
    try:
        yield folder
        run.trainer.accelerator.wait_for_everyone()
    finally:
        if run.trainer.args.local_process_index == 0:
            shutil.rmtree(folder, ignore_errors=True)
            if run.makes_folder:
                with suppress(OSError):  # not empty
                    run.output_dir.rmdir()
