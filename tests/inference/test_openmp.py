"""OpenMP's workers end with the work of a thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.inference.openmp import _find_openmp
from tests.conftest import REPOSITORY

COUNT = """
import os, torch
count = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
torch.ones(512, 512) @ torch.ones(512, 512)
"""
RELEASE = """
from draftsmith.inference.openmp import release_workers
before = count()
release_workers()
after = count()
torch.ones(512, 512) @ torch.ones(512, 512)
print(before - after, count() - after)
"""
DECODE = """
import signal, sys
from draftsmith.inference import Decoder
from tests.tiny_targets import tiny_target
before = count()
decoder = Decoder(tiny_target("llama", hidden_size=512, intermediate_size=2048))
made = count()
prompt, options = torch.ones(1, 40, dtype=torch.long), {"do_sample": False, "max_new_tokens": 4}
decoder.generate(prompt, **options)
stream = decoder.stream(prompt, **options)
next(stream)
open_ = count()
if (child := os.fork()) == 0:
    signal.alarm(60)
    del stream
    os._exit(0)
forked = os.waitpid(child, 0)[1]
stream.close()
print(before - made, open_ - made, count() - made, forked)
unfinished = decoder.stream(prompt, **options)
next(unfinished)  # the interpreter ends with it
"""


def run(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", COUNT + program], capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists() or _find_openmp() is None, reason="counts threads of Linux"
)


def test_workers_end_and_come_back() -> None:
    assert run(RELEASE) == ["2", "2"]


def test_decoding_leaves_no_workers() -> None:
    """Nor does a fork or the interpreter's end wait for them."""
    assert run(DECODE) == ["2", "2", "0", "0"]
