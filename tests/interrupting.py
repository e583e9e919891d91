"""Ctrl-C as a user presses it: a program in a process of its own, and SIGINT to it and its children."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

from tests.conftest import REPOSITORY


def interrupt(words: Sequence[str], *, when: str) -> str:
    """Runs `draftsmith WORDS`, interrupts it when its error output has `when` (a regular expression), and returns the
    last line. There is no traceback, and the status is that of Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, "-m", "draftsmith", *words],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    ) as process:
        assert process.stderr is not None
        told = ""
        while not re.search(when, told):
            piece = process.stderr.read(1)
            assert piece, told
            told += piece
        os.killpg(process.pid, signal.SIGINT)
        told += process.stderr.read()
    assert process.returncode == 130, told
    assert "Traceback" not in told
    return told.splitlines()[-1]
