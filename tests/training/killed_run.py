"""Training runs in processes of their own: one that kills itself at a given moment, one whose disk is full, ...; kept
apart so that such a process can import them."""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from draftsmith.training.options.command_line import parse_arguments
from draftsmith.training.options.run_options import RunOptions
from draftsmith.training.run.preparation import prepare_run

# What a run does to its folder: every such event is a moment at which it can be killed.
FILE_EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Moments:
    """Counts the moments of a run, and dies at the one that was drawn (SIGKILL: nothing is flushed or cleaned up)."""

    def __init__(self, output_dir: Path, last: int | None) -> None:
        self.output_dir, self.last, self.passed = str(output_dir), last, 0
        self.is_counting = True
        sys.addaudithook(self.see)

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        is_write = event == "open" and isinstance(args[1], str) and args[1] != "r"
        if (is_write or event in FILE_EVENTS) and self.output_dir in str(args[0]):
            self.tick()

    def tick(self) -> None:
        self.passed += self.is_counting
        if self.passed == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


class EveryMoment(TrainerCallback):
    """Before and after each optimizer step, each log line, each evaluation and each save; they are counted from the
    end of step `first_step` on."""

    def __init__(self, moments: Moments, first_step: int) -> None:
        self.moments, self.first_step = moments, first_step

    def on_step_begin(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        self.moments.is_counting = state.global_step >= self.first_step
        self.moments.tick()

    on_pre_optimizer_step = on_optimizer_step = on_step_end = on_log = on_evaluate = on_save = on_step_begin


def run_and_die(
    arguments: list[str], output_dir: Path, last: int | None, count_file: Path, first_step: int = 0
) -> None:
    """Trains; killed at moment `last` (None: not at all, and `count_file` then says how many moments there were)."""
    run = prepare_run(RunOptions(*parse_arguments(arguments)))
    moments = Moments(output_dir, last)
    run.trainer.add_callback(EveryMoment(moments, first_step))
    run.finish()
    count_file.write_text(str(moments.passed))


def run_rank_and_die(arguments: list[str], output_dir: Path, last: int | None, count_file: Path) -> None:
    """One of several processes; only the second is killed."""
    rank = os.environ["RANK"]
    run_and_die(arguments, output_dir, last if rank == "1" else None, count_file.with_name(count_file.name + rank))


class FullDisk(TrainerCallback):
    """From some step on, the kernel lets this process write no file beyond so many bytes."""

    def __init__(self, step: int, num_bytes: int) -> None:
        self.step, self.num_bytes = step, num_bytes

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.num_bytes, resource.RLIM_INFINITY))


def run_with_full_disk(arguments: list[str], step: int, num_bytes: int, message_file: Path) -> None:
    """Trains until a file cannot be written; what the error says is in `message_file`."""
    run = prepare_run(RunOptions(*parse_arguments(arguments)))
    run.trainer.add_callback(FullDisk(step, num_bytes))
    try:
        run.finish()
    except (OSError, RuntimeError) as error:
        message_file.write_text(str(error))
