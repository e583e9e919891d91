"""How a checkpoint reaches the disk, whole or not at all, and how a resumed epoch repeats the interrupted one.

A checkpoint is written into `.incomplete-checkpoint` and renamed to `checkpoint-STEP` when every process has written
its part. So a kill or a full disk never leaves half a checkpoint under that name. Beside transformers' files it holds
`run.json`: the properties that a resumed run must share (`resume.py`), and the seconds of training so far.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import IntervalStrategy, sort_checkpoints

RUN_FILE = "run.json"
INCOMPLETE = ".incomplete-checkpoint"


@contextmanager
def write_whole(trainer: Any, folder: Path) -> Iterator[Path]:
    """Yields the folder to write a checkpoint into, then renames it to `folder`. Collective.

    The process with `args.should_save` renames; on machines with disks of their own, the first process of each.
    """
    aside = folder.parent / INCOMPLETE
    if trainer.args.should_save:
        shutil.rmtree(aside, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    try:
        yield aside / folder.name
        trainer.accelerator.wait_for_everyone()
        if trainer.args.should_save:
            _rename(aside / folder.name, folder)
        trainer.accelerator.wait_for_everyone()
        if trainer.args.local_process_index == 0 and (aside / folder.name).exists():
            with suppress(FileNotFoundError):  # a slow shared disk may still show the folder that was renamed
                _rename(aside / folder.name, folder)
    finally:
        if trainer.args.should_save or trainer.args.local_process_index == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _rename(written: Path, folder: Path) -> None:
    if folder.exists():  # of an earlier run, or of this run before it was resumed from an older checkpoint
        folder.rename(written.with_name("replaced"))
    written.rename(folder)


def remove_old(output_dir: Path, *, save_total_limit: int | None, best: str | None) -> None:
    """Keeps the newest checkpoints and the best one, as transformers' `rotate_checkpoints` does.

    A checkpoint is renamed before it is deleted, so that half-deleted folders never have a checkpoint's name. With a
    `save_total_limit` of None or 0 all stay.
    """
    if not save_total_limit:
        return
    *older, newest = map(Path, sort_checkpoints(str(output_dir), use_mtime=True, best_model_checkpoint=best))
    num_older = max(save_total_limit - 1, int(best is not None and Path(best) != newest))
    aside = output_dir / INCOMPLETE
    for folder in older[: max(0, len(older) - num_older)]:
        aside.mkdir(exist_ok=True)
        folder.rename(aside / folder.name)
        shutil.rmtree(aside, ignore_errors=True)


def write_run_file(folder: Path, description: dict[str, Any], seconds: float) -> None:
    """Writes `run.json`: the run's description (`resume.describe_run`) and the seconds of training so far."""
    (folder / RUN_FILE).write_text(json.dumps({**description, "seconds": seconds}, indent=2) + "\n", encoding="utf-8")


def read_run_file(folder: Path) -> dict[str, Any]:
    """The content of `run.json`."""
    found: dict[str, Any] = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    return found


class ExactEpochs(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Makes a resumed epoch equal to an uninterrupted one.

    - The order of the rows depends only on the seed and the epoch's number. accelerate does not reach the sampler below
      the batches that it skips, and length-grouped batches follow the global random state.
    - Intervals come from the options, not from the checkpoint.
    - A checkpoint at an epoch's last step is written after the logs and evaluations of that step, which a resumed run
      would otherwise leave out.
    """

    def __init__(self) -> None:
        self._is_save_due = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.compute_steps(args, state.max_steps)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        epoch = int(state.epoch or 0)
        sampler = _innermost_sampler(kwargs["train_dataloader"])
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator = torch.Generator().manual_seed(args.seed_of_data + epoch)
        elif hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        is_last = control.should_training_stop or float(state.epoch or 0).is_integer()
        more_follows = IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy)
        if control.should_save and is_last and more_follows:
            control.should_save, self._is_save_due = False, True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        control.should_save |= self._is_save_due
        self._is_save_due = False


def _innermost_sampler(dataloader: DataLoader[Any]) -> Any:
    batches: Any = dataloader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)
