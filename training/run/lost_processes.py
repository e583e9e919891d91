"""What the remaining processes of a run say when one of them has died: which one it was, and how to go on."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
import torch.distributed as dist

from training.run.resume import find_checkpoint
from training.run.stopping import TrainingStoppedError

_PATIENCE = 2.0  # seconds in which a process whose connections have broken is seen to be gone


@contextmanager
def naming_lost_processes(output_dir: Path) -> Iterator[None]:
    """Ends this process in one message (SystemExit) when another one of the run has died.

    A dead process breaks the connections of the others, or they wait for it until the launcher ends them by SIGTERM.
    Errors that are this process's own pass through. The first two processes speak, of which one is alive.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    processes: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
    dist.all_gather_object(processes, (socket.gethostname(), os.getpid()))
    own_process = os.getpid()

    def end(signal_number: int, frame: FrameType | None) -> None:
        if os.getpid() != own_process:  # a worker of a data loader, which inherits this
            os._exit(128 + signal_number)
        _say(_find_lost(processes), output_dir)
        os._exit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except TrainingStoppedError:  # all of them stop
        raise
    except RuntimeError:
        deadline = time.monotonic() + _PATIENCE
        while not (lost := _find_lost(processes)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not lost:
            raise
        _say(lost, output_dir)
        os._exit(1)  # an orderly end would wait for the dead
    finally:
        signal.signal(signal.SIGTERM, before)


def _find_lost(processes: list[tuple[str, int]]) -> list[int]:
    """Ranks of this machine's processes that are gone."""
    return [rank for rank, (host, pid) in enumerate(processes) if host == socket.gethostname() and not _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _say(lost: list[int], output_dir: Path) -> None:
    if dist.get_rank() > 1:
        return
    who = f"process {lost[0]} has died" if lost else "the launcher ended this process: another one, elsewhere, has died"
    checkpoint = find_checkpoint(str(output_dir), True, is_main_process=False)
    kept = f"{checkpoint} is complete" if checkpoint else "there is no complete checkpoint yet"
    how = "go on with the same command and --resume_from_checkpoint true" if checkpoint else "start again"
    sys.stderr.write(
        f"train_heads.py, process {dist.get_rank()}: {who} (killed, out of memory, or by the error it printed); "
        f"{kept}: {how}\n"
    )
    sys.stderr.flush()
