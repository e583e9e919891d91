"""What a run says while it trains: a line every half minute, and Ctrl-C, which saves a checkpoint first."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith.training.distributed.launch import count_launched

logger = logging.getLogger(__name__)

LINE_SECONDS = 30.0  # between two lines, unless logging_steps is given


def describe_time(seconds: float) -> str:
    """
    >>> describe_time(40), describe_time(1500), describe_time(9000), describe_time(540000)
    ('40 seconds', '25 minutes', '2.5 hours', '150 hours (6.2 days)')
    """
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    hours = f"{seconds / 3600:.3g} hours"
    return hours if seconds < 2 * 86400 else f"{hours} ({seconds / 86400:.1f} days)"


class ProgressLines(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Logs about every `LINE_SECONDS` and at the last step, and prints the logs as lines. Collective.

    The number of steps between two logs follows from the time of the last ones, in every process alike.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start = self._last = (time.perf_counter(), state.global_step, state.num_input_tokens_seen)
        if args.logging_steps is None:
            state.logging_steps = 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.logging_steps is None and state.global_step >= state.max_steps:
            control.should_log = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        if "loss" in logs:
            self._log_training(args, state, logs)
        elif "eval_loss" in logs:
            length = logs.get("eval_acceptance_length")
            words = "" if length is None else f"acceptance length {length:.2f}, "
            logger.info("held out: %s%s", words, describe_drafts(logs, "eval_"))

    def _log_training(self, args: TrainingArguments, state: TrainerState, logs: dict[str, Any]) -> None:
        now, step, tokens = time.perf_counter(), state.global_step, state.num_input_tokens_seen
        seconds, num_steps = now - self._last[0], step - self._last[1]
        if args.logging_steps is None:
            # The first steps may be much faster than later ones.
            interval = [max(1, min(4 * num_steps, round(LINE_SECONDS * num_steps / seconds)))]
            broadcast_object_list(interval)
            state.logging_steps = interval[0]
        speed = f", {(tokens - self._last[2]) / seconds:,.0f} tokens/s" if tokens > self._last[2] else ""
        left = (state.max_steps - step) * (now - self._start[0]) / (step - self._start[1])
        self._last = (now, step, tokens)
        logger.info(
            "step %s of %s (epoch %.2f): %s%s, %s",
            *(f"{step:,}", f"{state.max_steps:,}", state.epoch or 0, describe_drafts(logs, ""), speed),
            f"{describe_time(left)} left" if left else f"{describe_time(now - self._start[0])} in all",
        )


def describe_drafts(logs: dict[str, Any], prefix: str) -> str:
    """
    >>> describe_drafts({"eval_loss": 2.126, "eval_top1_depth1": 0.414}, "eval_")
    'loss 2.13 a token, 41% right at depth 1'
    """
    right = logs.get(f"{prefix}top1_depth1")
    return f"loss {logs[f'{prefix}loss']:.3g} a token" + ("" if right is None else f", {right:.0%} right at depth 1")


class SaveOnInterrupt(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """The first Ctrl-C lets the step end, saves a checkpoint and ends training; the second one ends at once.

    Only in a process of its own: a launcher ends its processes at once when it is interrupted.
    """

    is_interrupted = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Raises KeyboardInterrupt at the end if there was a Ctrl-C."""
        if count_launched() > 1 or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._process = os.getpid()
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if self.is_interrupted:
            raise KeyboardInterrupt

    def _interrupt(self, *_: Any) -> None:
        if os.getpid() != self._process:  # a worker of the data loader, which the terminal interrupts too
            return
        self.is_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logger.info("interrupted: saving a checkpoint after this step (Ctrl-C once more ends at once)")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.is_interrupted:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.is_interrupted:  # with save_total_limit 1, transformers would now keep the best checkpoint only
            state.best_model_checkpoint = None

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.is_interrupted:
            control.should_evaluate = False
