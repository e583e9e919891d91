"""Real processes: rank 0 and two servers over gloo, with every message late."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

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


@pytest.mark.ci
@pytest.mark.slow
def test_texts_are_the_same_and_a_killed_server_ends_the_run() -> None:
    ranks = start_ranks("12", "--kill")
    try:
        output = ranks[0].communicate(timeout=300)[0]
        ranks[1].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    found = re.search(r"(\d+) of 12 texts are the same, and in (\d+) answers overtook", output)
    assert found, output
    assert found[1] == "12"
    assert found[2] != "0"
    assert ranks[0].returncode == 1
    assert "RuntimeError: the target server of rank 2 has died" in output
    assert ranks[1].returncode == 0, "the other server is told to end"
