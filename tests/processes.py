"""Processes: Python from its start, or clean copies of one that has imported everything, alone or as ranks."""

import multiprocessing.connection
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")  # then the number of processes


def run_python(*words: str, typed: str = "", timeout: int = 500, **environment: str) -> str:
    """Runs Python in the repository, with one thread and no GPU; returns all that it prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@cache
def _server() -> Any:
    """It starts when the first process does, once for all tests of a worker."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.training.killed_run", "tests.heads.tiny_heads"])
    return context


def start_process(function: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that imports nothing anew."""
    process: BaseProcess = _server().Process(target=function, args=args)
    process.start()
    return process


def start_ranks(count: int, output: Path, function: Callable[..., None], *args: Any) -> list[BaseProcess]:
    """Processes with the environment that torchrun gives to its own; rank R writes to the file `output`R."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
    return [
        start_process(_run_rank, {**common, "RANK": rank, "LOCAL_RANK": rank}, f"{output}{rank}", function, args)
        for rank in range(count)
    ]


def _run_rank(environment: dict[str, Any], output: str, function: Callable[..., None], args: Any) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    function(*args)


def end_ranks(ranks: list[BaseProcess], timeout: float = 300) -> list[int | None]:
    """Waits for all, and as torchrun ends the others where one has failed; returns their exit codes."""
    waiting = {rank.sentinel: rank for rank in ranks}
    while waiting:
        ended = multiprocessing.connection.wait(list(waiting), timeout)
        hanging = [place for place, rank in enumerate(ranks) if rank.is_alive()]
        for rank in () if ended else waiting.values():
            rank.kill()
        assert ended, f"ranks {hanging} hang"
        failed = [rank for rank in (waiting.pop(one) for one in ended) if rank.join() or rank.exitcode]
        if failed:
            for rank in waiting.values():
                rank.kill()
    return [rank.exitcode for rank in ranks]


@contextmanager
def limited_file_size(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond it: as on a full disk, writing fails in the middle of one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
