"""OpenMP's workers end with the work of a thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from draftsmith.inference import Decoder
from draftsmith.inference.openmp import _find_openmp, release_workers

PROGRAM = """
import os, torch
from draftsmith.inference.openmp import release_workers
count = lambda: len(os.listdir("/proc/self/task"))
work = lambda: torch.ones(512, 512) @ torch.ones(512, 512)
torch.set_num_threads(3)
work()
before = count()
release_workers()
after = count()
work()
print(before - after, count() - after)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists() or _find_openmp() is None, reason="counts threads of Linux")
def test_workers_end_and_come_back() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "2"]


def test_decoding_in_another_thread(chat_target: torch.nn.Module) -> None:
    decoder, texts = Decoder(chat_target), []
    prompt = torch.tensor([[1, 2, 3]])

    def decode() -> None:
        texts.append(decoder.generate(prompt, do_sample=False, max_new_tokens=4).sequences.tolist())

    thread = threading.Thread(target=decode)
    thread.start()
    thread.join()
    decode()
    release_workers()  # twice in a row
    release_workers()
    assert texts[0] == texts[1]
