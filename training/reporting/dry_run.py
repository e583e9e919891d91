"""`--dry_run`: all that could fail in hours fails in a minute, and what the run will take is known before.

The steps are real ones of the run's own trainer, under whatever it was launched with: two on its longest rows, two on
rows of median length, then an evaluation, and a checkpoint in a temporary folder, which is resumed for one more step.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object
from huggingface_hub import HfApi
from transformers import AutoTokenizer
from transformers.trainer_utils import SaveStrategy

from inference.targets.model_config import LengthLimit
from training.data.options import DataArguments, seed_of_data
from training.data.streaming import ConversationStream
from training.data.training_sets import load_datasets
from training.features.options import FeatureArguments
from training.features.target_options import ModelArguments, PlacementArguments
from training.options.arguments import HeadsTrainingArguments
from training.options.checks import check_options
from training.options.run_arguments import RunArguments, pick
from training.reporting.run_costs import (
    Figures,
    data_figures,
    disk_figures,
    memory_figures,
    num_times,
    parameter_figures,
    project_seconds,
    row_lengths,
    step_sizes,
)
from training.reporting.trial import (
    TRIAL_STEPS,
    decode,
    evaluate,
    first_rows,
    make_steps,
    resume,
    temporary_folder,
    write_replies,
)
from training.run.evaluation import eval_prompts
from training.run.joint import JointArguments
from training.run.run import PreparedRun, prepare_run

_Found = TypeVar("_Found")
# What goes wrong for a user; anything else is a bug of ours and keeps its traceback.
_EXPECTED = (ValueError, OSError, RuntimeError, ImportError)


class StoppedError(Exception):
    """What is found beyond a problem would be wrong."""


@dataclass
class DryRun:
    """What was found: problems that would end the run, warnings, checks that passed, and figures by section (bytes,
    seconds, counts)."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    figures: dict[str, Figures] = field(default_factory=dict)

    def check(self, what: str, act: Callable[[], _Found], *, together: bool = False) -> _Found | None:
        """Does it, and notes whether it could be done.

        Args:
            together: with the other processes, if any, which would wait for this one: none goes on with a problem.
        """
        try:
            found = act()
        except _EXPECTED as error:
            problem = f"{what}: {error}"
            if not any(known.endswith(f": {error}") for known in self.problems):
                self.problems.append(problem)
            if together and PartialState().num_processes > 1:
                raise StoppedError from error
            return None
        self.passed.append(what)
        return found


def dry_run(*arguments: Any) -> DryRun:
    """Tries a run out; the arguments are those of `training.run.run.run_training`. Leaves nothing in `output_dir`."""
    model_args, data_args, training_args, *more = arguments
    found = DryRun()
    output_dir = Path(training_args.output_dir)
    with _collect_warnings(found.warnings), _leave_no_folder(output_dir), suppress(StoppedError):
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
    is_stream = isinstance(trainer.train_dataset, ConversationStream)
    steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
    rows = found.check("reading the data", lambda: first_rows(trainer), together=True)
    if rows is None:
        return
    trainer.train_dataset = rows
    sizes = step_sizes(trainer, row_lengths(rows, "input_ids"))
    epochs = 0.0 if is_stream else steps / len(sizes)
    num_evaluations = max(1, num_times(args.eval_strategy, args.eval_steps or args.logging_steps, steps, epochs))
    num_saves = num_times(args.save_strategy, args.save_steps, steps, epochs)
    if args.save_strategy == SaveStrategy.BEST:  # at most
        num_saves = num_evaluations
    limit = args.save_total_limit or 0
    found.figures["parameters"] = parameter_figures(
        trainer.target.model, trainer.accelerator.unwrap_model(trainer.model)
    )
    name = f"data (the first {len(rows):,} rows of a stream)" if is_stream else "data"
    found.figures[name] = data_figures(rows, sizes, args.world_size)
    found.figures["steps"] = {"optimizer steps": steps, **({} if is_stream else {"epochs": round(epochs, 4)})}

    decoding = found.check("decoding a prompt", lambda: decode(trainer.measure_acceptance), together=True) or 0.0
    writing = found.check("writing on-policy replies", lambda: write_replies(trainer), together=True) or 0.0
    with temporary_folder(trainer, run.output_dir) as folder:
        trial = found.check("training steps", lambda: make_steps(trainer, folder), together=True)
        if trial is not None:  # before an evaluation leaves the heads whole that FSDP has split
            trial_sizes = step_sizes(trainer, row_lengths(trainer.train_dataset, "input_ids"))
            tokens = max(trial_sizes) // args.gradient_accumulation_steps
            found.figures["memory of a process"] = memory_figures(trainer, max(trial.saved), tokens)
        # Behind the steps, because it is those that set heads up under DeepSpeed and FSDP.
        evaluating = found.check("evaluating held-out rows", lambda: evaluate(trainer), together=True) or 0.0
        if trial is None:
            return
        checkpoint = folder / f"checkpoint-{TRIAL_STEPS}"
        found.check("saving and resuming a checkpoint", lambda: resume(trainer, checkpoint), together=True)
        if args.world_size > 1:
            found.problems = list(dict.fromkeys(gather_object(found.problems)))
        if args.process_index:  # the first one tells
            return
        disk = disk_figures(checkpoint, run.output_dir, num_saves=num_saves, save_total_limit=limit)
    found.figures["disk"] = disk if not run.stored_bytes else {**disk, "features": run.stored_bytes}
    if int(disk["the run"]) > int(disk["free"]):
        found.problems.append(
            f"disk: the run needs {disk['the run']:,} bytes in {run.output_dir}, {disk['free']:,} are free: lower "
            "save_total_limit or save less often, or give another output_dir"
        )
    # Fewer rows than a step takes make fewer steps of an epoch than the trial had.
    trials = {trial_sizes[index % len(trial_sizes)]: trial.seconds[index] for index in (1, 3)}
    all_steps = project_seconds(sizes, steps, trials)
    evaluations = num_evaluations * (decoding + evaluating)
    found.figures["time"] = {
        "a step on the longest rows": trial.seconds[1],
        "a step on median rows": trial.seconds[3],
        "all steps": all_steps,
        f"evaluations ({num_evaluations})": evaluations,
        **({"on-policy replies": math.ceil(epochs) * writing} if writing else {}),
        "sum": all_steps + evaluations + math.ceil(epochs) * writing,
    }


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
