"""Runs an engine's server on the CPU."""

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

import pytest

from tests.engines.environments.running import clean_environment

VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def running_vllm(python: str, words: Sequence[str], log: Path, *, modules: Path | None = None) -> Iterator[str]:
    """The address of `vllm serve WORDS` on this machine; it is stopped afterwards.

    Args:
        python: that has vLLM.
        modules: a folder of modules that the server imports.
    """
    target, *options = words
    # The build for CPUs has no `vllm` command.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, *options, "--enforce-eager"]
    variables = VLLM_VARIABLES if modules is None else {**VLLM_VARIABLES, "PYTHONPATH": str(modules)}
    with running_server(command, log, variables) as address:
        yield address


@contextmanager
def running_server(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """The address of the server that `command --host HOST --port PORT` starts; it is stopped afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        log.open("w", encoding="utf-8") as lines,
        subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={**clean_environment(), **variables},
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
