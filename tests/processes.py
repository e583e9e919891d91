"""Python in processes of its own: one, or several that a launcher starts."""

from __future__ import annotations

import os
import subprocess
import sys

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
