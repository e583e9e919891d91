"""The steps that fit into `--time_budget`: the speed is measured on a few rows before the run begins."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from draftsmith.heads.modules.host_tensors import read_on_host
from draftsmith.training.data.set_statistics import row_lengths
from draftsmith.training.features.sources import FeatureSource
from draftsmith.training.run.progress import describe_time
from draftsmith.training.run.stopping import FiniteWatch
from draftsmith.training.run.trainer import HeadsTrainer

MEASURED_SECONDS = 15.0  # a whole batch is measured if it takes no longer
# Of a time budget, for steps; the rest is for evaluations and checkpoints.
USED_SHARE = 0.9
FEWEST_STEPS = 20  # fewer than these learn nothing


@dataclass(frozen=True)
class Pace:
    """The speed of a run, and its size.

    Attributes:
        tokens_per_second: of all processes together, without evaluations.
        tokens_per_step: the mean of an optimizer step of all processes.
        num_steps: that the options ask for.
    """

    tokens_per_second: float
    tokens_per_step: float
    num_steps: int

    @property
    def seconds(self) -> float:
        return self.num_steps * self.tokens_per_step / self.tokens_per_second

    def fit(self, budget: float) -> int:
        """The steps that fit into `budget` seconds, up to `num_steps`.

        Raises:
            ValueError: too few for heads to learn from.
        """
        steps = int(USED_SHARE * budget * self.tokens_per_second / self.tokens_per_step)
        if steps < FEWEST_STEPS:
            least = FEWEST_STEPS * self.tokens_per_step / self.tokens_per_second / USED_SHARE
            raise ValueError(
                f"got a time_budget of {describe_time(budget)}, in which {steps} steps fit, and heads need at least "
                f"{FEWEST_STEPS}: give at least {describe_time(least)}, or smaller steps "
                "(--gradient_accumulation_steps 1 --per_device_train_batch_size 1, a smaller --max_length)"
            )
        return min(steps, self.num_steps)

    def describe(self) -> str:
        return (
            f"measured {self.tokens_per_second:,.0f} tokens/s: {self.num_steps:,} steps of {self.tokens_per_step:,.0f} "
            f"tokens take about {describe_time(self.seconds)}, without evaluations"
        )


def measure_pace(trainer: HeadsTrainer, source: FeatureSource) -> Pace:
    """Times passes and an optimizer step, and leaves the heads and the random numbers as they were. Collective.

    Args:
        source: of the target's states; it writes nothing.
    """
    rows: Any = trainer.train_dataset
    args = trainer.args
    lengths = row_lengths(rows)
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    num_batches = math.ceil(len(rows) / (args.train_batch_size * args.world_size))
    steps_per_epoch = math.ceil(num_batches / args.gradient_accumulation_steps)
    num_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
    model: Any = trainer.model
    was_training = model.training
    model.train()
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # the newer name first; Trainer does so later
        if getattr(args, name, None):
            getattr(model, f"{name}_enable")()
            break
    with torch.random.fork_rng():
        speed = _measure_speed(trainer, source, rows)
        optimizer_seconds = _time_optimizer(trainer)
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    trainer.watch = FiniteWatch()
    tokens = per_step * sum(lengths) / len(lengths)
    seconds = tokens / args.world_size / speed + optimizer_seconds
    slowest = max(gather_object([seconds]))  # the same number in every process: a time budget sets steps by it
    return Pace(tokens / slowest, tokens, num_steps)


def _measure_speed(trainer: HeadsTrainer, source: FeatureSource, rows: Any) -> float:
    """Tokens per second of this process: of a row, twice because the first pass warms up, then of a whole batch."""
    speed = max(_time_batch(trainer, source, [rows[0]]) for _ in range(2))
    batch = [rows[i % len(rows)] for i in range(trainer.args.train_batch_size)]
    fits = [sum(len(row["input_ids"]) for row in batch) / speed < MEASURED_SECONDS]
    broadcast_object_list(fits)  # processes that share a target make equally many passes
    return _time_batch(trainer, source, batch) if fits[0] else speed


def _time_optimizer(trainer: HeadsTrainer) -> float:
    """Seconds of an optimizer step that changes nothing: its gradients and learning rates are 0. FSDP and DeepSpeed
    make their optimizers when they train, so theirs takes no time here."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return 0.0
    optimizer = trainer.create_optimizer()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    trainer.optimizer = None  # the run makes its own
    optimizer.step()  # makes the moments
    _wait()
    start = time.perf_counter()
    optimizer.step()
    _wait()
    return time.perf_counter() - start


def _time_batch(trainer: HeadsTrainer, source: FeatureSource, rows: list[dict[str, Any]]) -> float:
    """Tokens per second of a forward and a backward pass."""
    inputs = trainer._prepare_inputs(trainer.data_collator(rows))
    start = time.perf_counter()
    trainer.draft_from(source(inputs), inputs, trainer.heads, cast(nn.Module, trainer.model), None).loss.backward()
    _wait()
    return int(read_on_host(inputs["attention_mask"]).sum()) / (time.perf_counter() - start)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
