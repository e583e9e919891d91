"""The environment of a benchmark: machine, versions, commit and command."""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
# Instruction sets that decide what a wide forward pass costs on a CPU.
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "sve", "bf16")


def describe_program() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "commit": read_commit(ROOT),
        "command": shlex.join(["python", *map(_shorten, sys.argv)]),
    }


def _shorten(word: str) -> str:
    """A file of this repository becomes a relative path, as a reader would type it."""
    return str(Path(word).relative_to(ROOT)) if Path(word).is_absolute() and Path(word).is_relative_to(ROOT) else word


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The hardware, and the versions of torch and transformers."""
    cpu, flags = _read_cpu()
    return {
        "cpu": cpu,
        "cpu_flags": flags,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _read_cpu() -> tuple[str, list[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine(), []
    values = dict(reversed([(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line]))
    flags = set(values.get("flags", values.get("Features", "")).split())
    name = values.get("model name") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores", [flag for flag in CPU_FLAGS if flag in flags]


def read_commit(folder: Path) -> str | None:
    """The commit that is checked out, with a + if tracked files have changed; None for no checkout, or without git."""
    if not (folder / ".git").exists():  # git would answer for a repository around the folder
        return None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
