"""How a resumed epoch repeats the interrupted one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import IntervalStrategy

from draftsmith.training.data.options import seed_of_data


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

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        epoch = int(state.epoch or 0)
        sampler = _innermost_sampler(kwargs["train_dataloader"])
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator = torch.Generator().manual_seed(seed_of_data(args) + epoch)
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
