"""How a checkpoint of a run reaches the disk, whole or not at all, and what it holds beyond transformers' files.

A checkpoint is written into `.incomplete-checkpoint` and renamed to `checkpoint-STEP` when every process has written
its part, so that a kill or a full disk never leaves half of one under that name. Beside transformers' files it holds

    run.json                     what must stay the same for the run to go on exactly (`resume.py`); its seconds
    metrics_PROCESS.safetensors  loss and accuracy since the last log line, which transformers would lose
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import IntervalStrategy, sort_checkpoints

from training.data.options import seed_of_data

RUN_FILE = "run.json"
INCOMPLETE = ".incomplete-checkpoint"
# Trainer's own sums since the last log line, and how it stores each of them.
_TRAINER_SUMS = {"_tr_loss": torch.float32, "_total_loss_scalar": torch.float64, "_globalstep_last_logged": torch.int64}


@contextmanager
def write_whole(trainer: Any, folder: Path) -> Iterator[Path]:
    """Yields the folder to write a checkpoint into, on every process; afterwards it is found under its own name.

    Args:
        trainer: of whose processes one renames: `args.should_save`, or on nodes with a disk of their own one of each.
        folder: the checkpoint's own name.
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
            with suppress(FileNotFoundError):  # a shared disk that is slow to say that it was renamed
                _rename(aside / folder.name, folder)
    finally:
        if trainer.args.should_save or trainer.args.local_process_index == 0:
            shutil.rmtree(aside, ignore_errors=True)


class RunClock:
    """Seconds of training, those before an interruption included."""

    def __init__(self) -> None:
        self._seconds_before = 0.0
        self._begin = time.perf_counter()

    def start(self, seconds_before: float = 0.0) -> None:
        """Counts from now on; `seconds_before` is what the checkpoint says that is resumed."""
        self._seconds_before, self._begin = seconds_before, time.perf_counter()

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._begin


def _rename(written: Path, folder: Path) -> None:
    if folder.exists():  # of an earlier run, or of this one before it was resumed from an older checkpoint
        folder.rename(written.with_name("replaced"))
    written.rename(folder)


def remove_old(output_dir: Path, *, save_total_limit: int | None, best: str | None) -> None:
    """As transformers' `rotate_checkpoints`: keeps the newest ones, the best one among them; but what is removed is no
    checkpoint by name any more before it is half deleted.

    Args:
        save_total_limit: how many are kept; None or 0 = all.
        best: folder of the best one.
    """
    checkpoints = [Path(folder) for folder in sort_checkpoints(str(output_dir), use_mtime=True)]
    protected = {checkpoints[-1], *([Path(best)] if best else [])}
    surplus = len(checkpoints) - max(save_total_limit or len(checkpoints), len(protected))
    aside = output_dir / INCOMPLETE
    for folder in [folder for folder in checkpoints if folder not in protected][: max(0, surplus)]:
        aside.mkdir(exist_ok=True)
        folder.rename(aside / folder.name)
        shutil.rmtree(aside, ignore_errors=True)


def write_run_file(folder: Path, description: dict[str, Any], seconds: float) -> None:
    """`run.json`: the run's description (see `resume.describe_run`), and the seconds it has trained so far."""
    (folder / RUN_FILE).write_text(json.dumps({**description, "seconds": seconds}, indent=2) + "\n", encoding="utf-8")


def write_file(path: Path, text: str) -> None:
    """Writes a file completely or not at all."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def read_run_file(folder: Path) -> dict[str, Any] | None:
    """What `write_run_file` wrote; None for a checkpoint without one."""
    file = folder / RUN_FILE
    if not file.is_file():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def save_metrics(trainer: Any, sums: dict[str, Tensor], folder: Path) -> None:
    """Stores this process's sums since the last log line, to the last bit: `sums`, ours, and Trainer's own."""
    tensors = dict(sums)
    for name, dtype in _TRAINER_SUMS.items():
        tensors[name] = torch.as_tensor(getattr(trainer, name), dtype=dtype)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, _file(trainer, folder))


def load_metrics(trainer: Any, sums: dict[str, Tensor], folder: Path) -> None:
    """Takes up what `save_metrics` stored, into `sums` and the trainer; a checkpoint without it changes nothing."""
    file = _file(trainer, folder)
    if not file.is_file():
        return
    for name, tensor in load_file(file).items():
        if name == "_tr_loss":
            trainer._tr_loss = tensor.to(trainer.args.device)
        elif name in _TRAINER_SUMS:
            setattr(trainer, name, tensor.item())
        else:
            sums[name] = tensor.to(trainer.args.device)


def _file(trainer: Any, folder: Path) -> Path:
    return folder / f"metrics_{trainer.args.process_index}.safetensors"


class ExactEpochs(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """An epoch goes the same way whether it was resumed or not.

    The order of its data depends on the seed and on the epoch's number alone. A resumed run of several processes would
    otherwise go through a later epoch in the order of the first one (accelerate does not reach the sampler behind the
    batches it skips), and length-grouped batches would follow from whatever random numbers were drawn before.

    Intervals are those of the options, which may have changed, not those that the checkpoint was written with.

    A checkpoint at its last step is written after what is logged and measured at its end, which a resumed run would
    otherwise leave out.
    """

    def __init__(self) -> None:
        self._is_save_due = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.compute_steps(args, state.max_steps)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        epoch = int(state.epoch or 0)
        sampler = _innermost_sampler(kwargs["train_dataloader"])
        if isinstance(sampler, LengthGroupedSampler):
            seed = seed_of_data(args)
            sampler.generator = torch.Generator().manual_seed(seed + epoch)
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
