"""A peer's code in a process and an environment of its own, which decodes one prompt at a time."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Self

from draftsmith.scripts.benchmarks.peers.texts import Text


class Worker:
    """A context in which the process runs.

    Args:
        script: `authors_worker.py`. checkout: the authors' code.
        folder: where the process runs, and what its job names lies.

    Attributes:
        header: the first line that the worker wrote.
    """

    def __init__(self, python: Path, script: Path, checkout: Path, folder: Path, job: dict[str, Any]) -> None:
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
        self._command = [str(python), str(script), "job.json"]
        self._errors = folder / "errors.txt"
        with self._errors.open("w") as errors:  # a pipe that nobody reads would fill up
            self._process = subprocess.Popen(
                self._command,
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Self:
        self.header = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the worker ends after its last prompt
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def decode(self, prompt: list[int], seed: int) -> Text:
        """The text after the prompt.

        Raises:
            ValueError: the worker has ended; with the end of what it wrote to stderr.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "seed": seed}) + "\n")
        self._process.stdin.flush()
        return Text(**self._read())

    def _read(self) -> dict[str, Any]:
        """The next JSON line; libraries may print lines of their own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        self._process.wait()
        raise ValueError(f"{' '.join(self._command[:2])} failed: {self._errors.read_text().strip()[-500:]}")
