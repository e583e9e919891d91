"""`--dry_run`: all that could fail in hours fails in a minute, and what the run will take is known before.

The steps are real ones of the run's own trainer, under whatever it was launched with: two on its longest rows, two on
rows of median length, then an evaluation, and a checkpoint in a temporary folder, which is resumed for one more step.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import datasets
from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi
from transformers import AutoTokenizer, EarlyStoppingCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from heads import DraftHeads
from inference.target_config import LengthLimit
from training.arguments import DataArguments, HeadsTrainingArguments, ModelArguments, seed_of_data
from training.data.training_sets import load_datasets
from training.evaluation import AcceptanceMeter, eval_prompts
from training.features.options import FeatureArguments
from training.features.sources import HybridFeatures
from training.features.target_loading import PlacementArguments
from training.joint import JointArguments
from training.joint_trainer import JointTrainer
from training.launching import loading_whole
from training.option_checks import check_options
from training.reporting.run_costs import (
    Figures,
    TrialSteps,
    data_figures,
    disk_figures,
    memory_figures,
    num_times,
    parameter_figures,
    project_seconds,
    row_lengths,
    step_sizes,
)
from training.resume import find_damage
from training.run import PreparedRun, prepare_run
from training.run_arguments import RunArguments, pick
from training.synthesis.on_policy import OnPolicyRows, WriteReplies
from training.trainer import HeadsTrainer

_Found = TypeVar("_Found")
# What goes wrong for a user; anything else is a bug of ours and keeps its traceback.
_EXPECTED = (ValueError, OSError, RuntimeError, ImportError)
TRIAL_STEPS = 4  # two on the longest rows, two on median ones; the first of each pair warms up
STREAMED_ROWS = 512  # of a stream, so many rows stand for all
TRIAL_TOKENS = 8  # decoded to see that decoding works


@dataclass
class DryRun:
    """What was found: problems that would end the run, warnings, checks that passed, and figures by section (bytes,
    seconds, counts)."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    figures: dict[str, Figures] = field(default_factory=dict)

    def check(self, what: str, act: Callable[[], _Found]) -> _Found | None:
        """Does it, and notes whether it could be done."""
        try:
            found = act()
        except _EXPECTED as error:
            problem = f"{what}: {error}"
            if not any(known.endswith(f": {error}") for known in self.problems):
                self.problems.append(problem)
            return None
        self.passed.append(what)
        return found


def dry_run(*arguments: Any) -> DryRun:
    """Tries a run out; the arguments are those of `training.run.run_training`. Leaves nothing in `output_dir`."""
    model_args, data_args, training_args, *more = arguments
    found = DryRun()
    output_dir = Path(training_args.output_dir)
    features = pick(more, FeatureArguments).features
    with _collect_warnings(found.warnings), _leave_no_folder(output_dir), _begin_no_features(features):
        found.check("output_dir", lambda: _write_something(output_dir))
        if training_args.push_to_hub:
            found.check("push_to_hub", lambda: _log_in(training_args.hub_token))
            training_args.push_to_hub = False  # Trainer makes the repository at once
        parts = pick(more, JointArguments), pick(more, PlacementArguments), pick(more, FeatureArguments)
        found.check("options", lambda: check_options(data_args, training_args, *parts))
        run = found.check("loading", lambda: prepare_run(*arguments))
        if run is not None:
            _try(found, run)
        else:
            _look_at_parts(found, model_args, data_args, training_args)
    file = pick(more, RunArguments).dry_run_json
    if file is not None and training_args.process_index == 0:
        Path(file).write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    return found


def _look_at_parts(
    found: DryRun, model_args: ModelArguments, data_args: DataArguments, training_args: HeadsTrainingArguments
) -> None:
    """What can be looked at without what could not be loaded."""
    code: dict[str, Any] = {"trust_remote_code": model_args.trust_remote_code}
    tokenizer = found.check("tokenizer", lambda: AutoTokenizer.from_pretrained(model_args.target, **code))
    if tokenizer is None:
        return
    found.check("data", lambda: load_datasets(data_args, tokenizer, seed=seed_of_data(training_args)))
    if data_args.eval_prompts is not None:
        found.check("eval_prompts", lambda: eval_prompts(data_args, None, tokenizer, LengthLimit(None, "")))


def _try(found: DryRun, run: PreparedRun) -> None:
    trainer, args = run.trainer, run.trainer.args
    rows, is_stream = _rows(trainer.train_dataset)
    steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
    trainer.train_dataset = rows
    sizes = step_sizes(trainer, row_lengths(rows, "input_ids"))
    epochs = 0.0 if is_stream else steps / len(sizes)
    num_saves = num_times(args.save_strategy, args.save_steps, steps, epochs)
    num_evaluations = max(1, num_times(args.eval_strategy, args.eval_steps or args.logging_steps, steps, epochs))
    limit = args.save_total_limit or 0
    found.figures["parameters"] = parameter_figures(
        trainer.target.model, trainer.accelerator.unwrap_model(trainer.model)
    )
    name = f"data (the first {len(rows):,} rows of a stream)" if is_stream else "data"
    found.figures[name] = data_figures(rows, sizes, args.world_size)
    found.figures["steps"] = {"optimizer steps": steps, **({} if is_stream else {"epochs": round(epochs, 4)})}

    decoding = found.check("decoding a prompt", lambda: _decode(trainer.measure_acceptance)) or 0.0
    writing = found.check("writing on-policy replies", lambda: _write_replies(trainer)) or 0.0
    with _temporary_folder(trainer) as folder:
        trial = found.check("training steps", lambda: _make_steps(trainer, folder))
        if trial is not None:  # before an evaluation leaves the heads whole that FSDP has split
            trial_sizes = step_sizes(trainer, row_lengths(trainer.train_dataset, "input_ids"))
            tokens = max(trial_sizes) // args.gradient_accumulation_steps
            found.figures["memory of a process"] = memory_figures(trainer, max(trial.saved), tokens)
        # Behind the steps, because it is those that set heads up under DeepSpeed and FSDP.
        evaluating = found.check("evaluating held-out rows", lambda: _evaluate(trainer)) or 0.0
        if trial is None:
            return
        checkpoint = folder / f"checkpoint-{TRIAL_STEPS}"
        found.check("saving and resuming a checkpoint", lambda: _resume(trainer, checkpoint))
        disk = disk_figures(checkpoint, run.output_dir, num_saves=num_saves, save_total_limit=limit)
    found.figures["disk"] = disk if not run.stored_bytes else {**disk, "features": run.stored_bytes}
    if int(disk["the run"]) > int(disk["free"]):
        found.problems.append(
            f"disk: the run needs {disk['the run']:,} bytes in {run.output_dir}, {disk['free']:,} are free: lower "
            "save_total_limit or save less often, or give another output_dir"
        )
    all_steps = project_seconds(sizes, steps, {trial_sizes[index]: trial.seconds[index] for index in (1, 3)})
    evaluations = num_evaluations * (decoding + evaluating)
    found.figures["time"] = {
        "a step on the longest rows": trial.seconds[1],
        "a step on median rows": trial.seconds[3],
        "all steps": all_steps,
        f"evaluations ({num_evaluations})": evaluations,
        **({"on-policy replies": math.ceil(epochs) * writing} if writing else {}),
        "sum": all_steps + evaluations + math.ceil(epochs) * writing,
    }


def _rows(train_set: Any) -> tuple[datasets.Dataset, bool]:
    """The rows; of a stream the first ones, and that it is one."""
    if isinstance(train_set, OnPolicyRows):
        return train_set.rows, False
    if isinstance(train_set, datasets.Dataset):
        return train_set, False
    return datasets.Dataset.from_list(list(islice(train_set, STREAMED_ROWS))), True


def _decode(meter: Callable[[], dict[str, float]] | None) -> float:
    """Decodes a few tokens; returns the seconds that all prompts will take at this speed."""
    if not isinstance(meter, AcceptanceMeter):
        return 0.0
    few = replace(meter, prompts=meter.prompts[:1], max_new_tokens=min(TRIAL_TOKENS, meter.max_new_tokens))
    few()  # warms up
    begin = time.perf_counter()
    few()
    share = len(meter.prompts) * meter.max_new_tokens / few.max_new_tokens
    return (time.perf_counter() - begin) * share


def _write_replies(trainer: HeadsTrainer) -> float:
    """Writes a batch of on-policy replies; returns the seconds that those of an epoch will take. The steps that follow
    are made without any."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, WriteReplies):
            trainer.remove_callback(callback)
            return callback.time_epoch()
    return 0.0


def _evaluate(trainer: HeadsTrainer) -> float:
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


def _make_steps(trainer: HeadsTrainer, folder: Path) -> TrialSteps:
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
        "logging_strategy": IntervalStrategy.NO,
        "train_sampling_strategy": "sequential",
        "load_best_model_at_end": False,
        "push_to_hub": False,
    }.items():
        setattr(args, name, value)
    if isinstance(trainer, JointTrainer):  # steps of both, which take the most
        trainer.joint.args = replace(trainer.joint.args, heads_warmup_steps=0)
    if isinstance(trainer.features, HybridFeatures):
        trainer.features.is_full = True
    trial = TrialSteps([*trainer.heads.parameters(), *trainer.target.model.parameters()])
    for callback in [*trainer.callback_handler.callbacks]:
        is_dashboard = type(callback).__module__.startswith("transformers.integrations")
        if is_dashboard or isinstance(callback, EarlyStoppingCallback):  # which will not do without evaluations
            trainer.remove_callback(callback)
    trainer.add_callback(trial)
    with trial.watch():
        trainer.train()
    return trial


def _resume(trainer: HeadsTrainer, checkpoint: Path) -> None:
    """Reads the checkpoint back as heads, and goes on from it for a step."""
    if damage := find_damage(checkpoint):
        raise ValueError(f"the checkpoint is not complete: {damage}")
    if trainer.args.process_index == 0:
        with loading_whole():  # ZeRO-3 would split them, and wait for the other processes
            DraftHeads.from_pretrained(checkpoint)
    if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):  # which cannot be set up twice in one process
        trainer.args.max_steps = TRIAL_STEPS + 1
        trainer.train(resume_from_checkpoint=str(checkpoint))


def _write_something(output_dir: Path) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output_dir) as file:
        file.write(b"x")


@contextmanager
def _leave_no_folder(output_dir: Path) -> Iterator[None]:
    """Folders that were made on the way to `output_dir` go again, unless something lies in them."""
    missing = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
    try:
        yield
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _log_in(token: str | None) -> None:
    try:
        HfApi().whoami(token)
    except Exception as error:  # without a network that of the HTTP library, which depends on the release
        raise OSError(f"cannot log in: {error}") from error


@contextmanager
def _begin_no_features(folder: str | None) -> Iterator[None]:
    """A folder of features that the run would begin is not begun."""
    if folder is None:
        yield
        return
    index = Path(folder) / "index.json"
    was_there = index.exists()
    with _leave_no_folder(index.parent):
        try:
            yield
        finally:
            if not was_there:
                index.unlink(missing_ok=True)


@contextmanager
def _temporary_folder(trainer: HeadsTrainer) -> Iterator[Path]:
    """One folder for all processes."""
    with tempfile.TemporaryDirectory() as mine:
        names = [mine]
        broadcast_object_list(names)
        yield Path(names[0])
        trainer.accelerator.wait_for_everyone()


@contextmanager
def _collect_warnings(into: list[str]) -> Iterator[None]:
    """What `training` and `heads` warn of meanwhile, such as conversations that are dropped."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            into.append(record.getMessage())

    handler = Collect(level=logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("training", "heads", "inference")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
