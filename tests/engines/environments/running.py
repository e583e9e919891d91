"""Programs of this folder that run in an engine's own environment."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest


def find_python(name: str) -> str:
    """The Python that an environment variable names; skips the test where there is none."""
    python = os.environ.get(name, "")
    if not python:
        pytest.skip(f"{name} names no Python with the engine: run `make test-engines`")
    return python


def clean_environment() -> dict[str, str]:
    """This process's variables without those of its own Python."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def run_worker(python: str, script: str, job: dict[str, Any], folder: Path, result: str, **environment: str) -> Path:
    """Runs `python script job.json RESULT` in `folder`, with more variables; returns the result's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [python, str(Path(__file__).with_name(script)), "job.json", result]
    variables = clean_environment() | environment
    run = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return folder / result
