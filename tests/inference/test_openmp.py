"""OpenMP's workers end with the work of a thread."""

import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.inference.openmp import _find_openmp
from tests.conftest import REPOSITORY

PROGRAM = """
import os, signal, time, torch
from draftsmith.inference import Decoder
from draftsmith.inference.openmp import release_workers
from tests.tiny_targets import tiny_target
torch.set_num_threads(3)

def count_started():
    time.sleep(0.1)  # threads that end leave /proc a little later
    before = len(os.listdir("/proc/self/task"))
    torch.ones(512, 512) @ torch.ones(512, 512)
    return len(os.listdir("/proc/self/task")) - before

started = [count_started(), count_started()]
release_workers()
print("released", *started, count_started())
decoder = Decoder(tiny_target("llama", hidden_size=512, intermediate_size=2048))
started = [count_started()]
prompt, options = torch.ones(1, 40, dtype=torch.long), {"do_sample": False, "max_new_tokens": 4}
decoder.generate(prompt, **options)
started.append(count_started())
stream = decoder.stream(prompt, **options)
next(stream)
started.append(count_started())
if (child := os.fork()) == 0:
    signal.alarm(60)
    del stream
    os._exit(0)
failed = os.waitpid(child, 0)[1]
stream.close()
print("decoded", *started, count_started(), failed)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists() or _find_openmp() is None, reason="counts threads of Linux")
def test_workers_end_and_come_back() -> None:
    """Decoding leaves none, and a forked child does not wait for its parent's."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM]  # of a fork beside threads
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["released", "2", "0", "2", "decoded", "2", "2", "0", "2", "0"]
