"""Real processes: rank 0 and two servers over gloo, with every message late."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.inference import generate
from draftsmith.scripts.shared.model_loading import encode_messages
from tests.conftest import REPOSITORY
from tests.processes import TORCHRUN, run_python

PROGRAM = [sys.executable, "-m", "tests.inference.distributed.ranks"]


def start_ranks(*arguments: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "3", "CUDA_VISIBLE_DEVICES": ""}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [*PROGRAM, *arguments],
            cwd=REPOSITORY,
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]


def read_counts(output: str) -> tuple[int, int, int]:
    found = re.search(r"(\d+) of (\d+) texts are the same, and in (\d+) answers overtook", output)
    assert found, output
    same, total, overtaken = map(int, found.groups())
    return same, total, overtaken


def check_fault(num_texts: int, fault: str, error: str) -> None:
    ranks = start_ranks(str(num_texts), fault)
    try:
        output = ranks[0].communicate(timeout=300)[0]
        ranks[1].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    same, total, overtaken = read_counts(output)
    assert same == total == num_texts
    assert overtaken > 0
    assert ranks[0].returncode == 1
    assert re.search(error, output), output
    assert ranks[1].returncode == 0, "the other server is told to end"


@pytest.mark.ci
@pytest.mark.slow
def test_texts_are_the_same_and_a_killed_server_ends_the_run() -> None:
    check_fault(12, "--kill", "RuntimeError: the target server of rank 2 has died")


@pytest.mark.slow
def test_a_server_that_hangs_ends_the_run() -> None:
    check_fault(6, "--hang", r"TimeoutError: no answer for 3 seconds from the target servers of ranks \[2\]")


@pytest.mark.slow
def test_texts_under_torchrun() -> None:
    same, total, _ = read_counts(run_python(*TORCHRUN, "3", "-m", "tests.inference.distributed.ranks", "60"))
    assert same == total == 60


@pytest.mark.slow
def test_the_example_under_accelerate(chat_target: PreTrainedModel, chat_tokenizer: PreTrainedTokenizerBase) -> None:
    """A real reply is the one that plain decoding gives."""
    config = ("--config_file", "configs/accelerate/multi_gpu.yaml", "--num_processes", "3", "--main_process_port", "0")
    output = run_python("-m", "accelerate.commands.launch", *config, "examples/distributed.py")
    prompt = encode_messages(chat_tokenizer, [{"role": "user", "content": "What are the benefits of exercise?"}])
    text = generate(chat_target, None, prompt, max_new_tokens=64, do_sample=False).sequences[0, prompt.shape[1] :]
    reply = chat_tokenizer.decode(text, skip_special_tokens=True)
    assert reply in output
    assert re.search(r"\d+ verifications, of which \d+ were wasted", output)
