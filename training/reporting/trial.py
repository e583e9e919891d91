"""What `--dry_run` does with a prepared run: everything that the run will do, once and with few rows."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from accelerate.utils import broadcast_object_list
from transformers import EarlyStoppingCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from heads import DraftHeads
from training.features.target_loading import loading_whole
from training.reporting.run_costs import TrialSteps, row_lengths
from training.run.evaluation import AcceptanceMeter
from training.run.joint_trainer import JointTrainer
from training.run.resume import find_damage
from training.run.trainer import HeadsTrainer
from training.synthesis.on_policy import OnPolicyRows, WriteReplies

TRIAL_STEPS = 4  # two on the longest rows, two on median ones; the first of each pair warms up
STREAMED_ROWS = 512  # of a stream, so many rows stand for all
TRIAL_TOKENS = 8  # decoded to see that decoding works


def first_rows(trainer: HeadsTrainer) -> datasets.Dataset:
    """The rows of the run; of a stream the first ones, after a batch of each of this process's readers."""
    train_set: Any = trainer.train_dataset
    if isinstance(train_set, OnPolicyRows):
        return train_set.rows
    if isinstance(train_set, datasets.Dataset):
        return train_set
    for _ in islice(trainer.get_train_dataloader(), max(1, trainer.args.dataloader_num_workers)):
        pass
    return datasets.Dataset.from_list(list(islice(train_set, STREAMED_ROWS)))


def decode(meter: Callable[[], dict[str, float]] | None) -> float:
    """Decodes a few tokens; returns the seconds that all prompts will take at this speed."""
    if not isinstance(meter, AcceptanceMeter):
        return 0.0
    few = replace(meter, prompts=meter.prompts[:1], max_new_tokens=min(TRIAL_TOKENS, meter.max_new_tokens))
    few()  # warms up
    begin = time.perf_counter()
    few()
    share = len(meter.prompts) * meter.max_new_tokens / few.max_new_tokens
    return (time.perf_counter() - begin) * share


def write_replies(trainer: HeadsTrainer) -> float:
    """Writes a batch of on-policy replies; returns the seconds that those of an epoch will take. The steps that follow
    are made without any."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, WriteReplies):
            trainer.remove_callback(callback)
            return callback.time_epoch()
    return 0.0


def evaluate(trainer: HeadsTrainer) -> float:
    """The loss of a batch of the longest held-out rows; returns the seconds that all rows will take."""
    rows: Any = trainer.eval_dataset
    if not isinstance(rows, datasets.Dataset):
        return 0.0
    lengths = row_lengths(rows, "input_ids")
    longest = sorted(range(len(rows)), key=lambda row: -lengths[row])
    longest = longest[: trainer.args.eval_batch_size * trainer.args.world_size]
    meter, trainer.measure_acceptance = trainer.measure_acceptance, None
    begin = time.perf_counter()
    trainer.evaluate(rows.select(longest))
    trainer.measure_acceptance = meter
    return (time.perf_counter() - begin) * len(rows) / len(longest)


def make_steps(trainer: HeadsTrainer, folder: Path) -> TrialSteps:
    """Real steps of the run's trainer, and a checkpoint of its own behind the last of them."""
    args, rows = trainer.args, trainer.train_dataset
    assert isinstance(rows, datasets.Dataset)
    lengths = row_lengths(rows, "input_ids")
    by_length = sorted(range(len(rows)), key=lambda row: lengths[row])
    num_rows = min(len(rows), args.train_batch_size * args.gradient_accumulation_steps * args.world_size)
    middle = (len(rows) - num_rows) // 2
    longest, median = by_length[-num_rows:], by_length[middle : middle + num_rows]
    trainer.train_dataset = rows.select([*longest, *longest, *median, *median])
    for name, value in {
        "output_dir": str(folder),
        "max_steps": TRIAL_STEPS,
        "save_strategy": SaveStrategy.STEPS,
        "save_steps": TRIAL_STEPS,
        "eval_strategy": IntervalStrategy.NO,
        "eval_on_start": False,
        "logging_strategy": IntervalStrategy.NO,
        "train_sampling_strategy": "sequential",
        "load_best_model_at_end": False,
        "push_to_hub": False,
    }.items():
        setattr(args, name, value)
    if isinstance(trainer, JointTrainer):  # steps of both, which take the most
        trainer.joint.args = replace(trainer.joint.args, heads_warmup_steps=0)
    trial = TrialSteps([*trainer.heads.parameters(), *trainer.target.model.parameters()])
    for callback in [*trainer.callback_handler.callbacks]:
        is_dashboard = type(callback).__module__.startswith("transformers.integrations")
        if is_dashboard or isinstance(callback, EarlyStoppingCallback):  # which will not do without evaluations
            trainer.remove_callback(callback)
    trainer.add_callback(trial)
    with trial.watch():
        trainer.train()
    return trial


def resume(trainer: HeadsTrainer, checkpoint: Path) -> None:
    """Reads the checkpoint back as heads, and goes on from it for a step."""
    is_main_process = trainer.args.process_index == 0
    damage = [find_damage(checkpoint) if is_main_process and not trainer.args.save_only_model else None]
    broadcast_object_list(damage)
    if damage[0]:
        raise ValueError(f"the checkpoint is not complete: {damage[0]}")
    if is_main_process:
        with loading_whole():  # ZeRO-3 would split them, and wait for the other processes
            DraftHeads.from_pretrained(checkpoint)
    # DeepSpeed and FSDP cannot be set up twice in one process.
    if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.args.save_only_model):
        trainer.args.max_steps = TRIAL_STEPS + 1
        trainer.train(resume_from_checkpoint=str(checkpoint))


@contextmanager
def temporary_folder(trainer: HeadsTrainer, output_dir: Path) -> Iterator[Path]:
    """One folder for all processes; those of several machines share the disk of `output_dir`."""
    has_other_machines = int(os.environ.get("LOCAL_WORLD_SIZE", trainer.args.world_size)) < trainer.args.world_size
    names = [""]
    if trainer.args.process_index == 0:
        names = [tempfile.mkdtemp(dir=output_dir.parent if has_other_machines else None)]
    broadcast_object_list(names)
    try:
        yield Path(names[0])
        trainer.accelerator.wait_for_everyone()
    finally:
        if trainer.args.local_process_index == 0:  # those of a machine that shares no disk have made it there as well
            shutil.rmtree(names[0], ignore_errors=True)
