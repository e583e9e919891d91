"""Runs vLLM's OpenAI-compatible server on the CPU."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

import pytest

VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def running_server(words: Sequence[str], log: Path, *, modules: Path | None = None) -> Iterator[str]:
    """The address of `vllm serve WORDS` on this machine; it is stopped afterwards.

    Args:
        modules: a folder of modules that the server imports.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | ENVIRONMENT
    if modules is not None:
        environment["PYTHONPATH"] = str(modules)
    target, *options = words
    # The build for CPUs has no `vllm` command.
    command = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", target, *options]
    with (
        log.open("w", encoding="utf-8") as lines,
        subprocess.Popen(
            [*command, "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            cwd=log.parent,
            stdout=lines,
            stderr=subprocess.STDOUT,
        ) as server,
    ):
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text(encoding="utf-8")[-4000:]
        try:
            with urllib.request.urlopen(url):
                return
        except URLError:
            time.sleep(1)
    pytest.fail(f"the server did not answer: {log.read_text(encoding='utf-8')[-4000:]}")
