"""How long a run will take: measured on a few rows before it begins, and fitted to `--time_budget`."""

import itertools
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

# Whole rows are measured while they fit into these seconds; before them a row of about so many tokens, twice.
MEASURED_SECONDS = 15.0
SHORT = 512
# Of a time budget, for steps; the rest is for evaluations and checkpoints.
USED_SHARE = 0.9
FEWEST_STEPS = 20  # fewer than these learn nothing
LONG = 2 * 3600.0  # then `describe` says what to do
# Least and most acceptance length of a chain of CHAIN at T = 0, of EAGLE-3 and MTP heads on small targets that learned
# from fewer tokens than the first number: docs/choosing-heads.md.
CHAIN = 4
EXPECTED = ((1.5e6, 1.0, 1.5), (3e6, 1.5, 1.9), (12e6, 1.9, 2.3), (math.inf, 2.3, math.inf))


def describe_expected(tokens: float, length: float | None = None) -> str:
    """What to expect from heads after so many tokens, and whether an acceptance length is as good.

    >>> describe_expected(2e6, 1.4).partition(";")[0]
    'a chain of 4 gives 1.40, less than usual'
    """
    _, least, most = next(bounds for bounds in EXPECTED if tokens < bounds[0])
    usual = f"below {most}" if least == 1 else f"above {least}" if most == math.inf else f"{least} to {most}"
    usual = f"usual after this many tokens: {usual} (EAGLE-3 and MTP on small targets; docs/choosing-heads.md)"
    if length is None:
        return f"acceptance length of chains of {CHAIN}: {usual}"
    verdict = "less than usual" if length < least else "more than usual" if length > most else "as usual"
    return f"a chain of {CHAIN} gives {length:.2f}, {verdict}; {usual}"


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
        """What the run costs and what to expect from it; for a long run also what to do."""
        tokens = self.num_steps * self.tokens_per_step
        amount = f"{tokens:,.0f}" if tokens < 1e6 else f"{tokens / 1e6:,.3g} M"
        lines = [
            f"measured {self.tokens_per_second:,.0f} tokens/s: {amount} tokens ({self.num_steps:,} steps) take about "
            f"{describe_time(self.seconds)}, without evaluations",
            describe_expected(tokens),
        ]
        if self.seconds > LONG:
            fitting = USED_SHARE * LONG * self.tokens_per_second
            lines.append(
                f"that is long. Fewer tokens: --time_budget 2h trains {fitting / 1e6:,.2g} M. Or a kind that trains "
                "faster (docs/choosing-heads.md), or a GPU"
            )
        return "\n".join(lines)


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
    devices = [args.device] if args.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
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
    """Tokens per second of this process: of a short row, twice because the first pass warms up, then of whole rows, up
    to a batch, which also has two passes, while there is time."""
    end = time.perf_counter() + MEASURED_SECONDS
    short = [_shorten(rows[0])]
    speed = max(_time_batch(trainer, source, short) for _ in range(2))
    count, before = 1, 0
    while True:
        batch = [rows[i % len(rows)] for i in range(count)]
        fits = time.perf_counter() + sum(len(row["input_ids"]) for row in batch) / speed < end
        decision = [fits]
        broadcast_object_list(decision)  # processes that share a target make equally many passes
        if not decision[0]:
            return speed
        speed = _time_batch(trainer, source, batch)  # long rows may be slower than the short one
        if count == before:
            return speed
        count, before = min(trainer.args.train_batch_size, 2 * count), count


def _shorten(row: dict[str, Any]) -> dict[str, Any]:
    """A packed row without the documents after its first `SHORT` tokens; a row of one document as it is."""
    ends = list(itertools.accumulate(row.get("document_lengths", ())))
    kept = [end for place, end in enumerate(ends) if not place or end <= SHORT]
    if not kept:
        return row
    return {
        "input_ids": row["input_ids"][: kept[-1]],
        "loss_mask": row["loss_mask"][: kept[-1]],
        "document_lengths": row["document_lengths"][: len(kept)],
    }


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
