"""A folder that a program writes."""

from __future__ import annotations

from pathlib import Path

from draftsmith.heads.checkpoint import SCRATCH


def check_new_folder(name: str) -> Path:
    """The path of a folder to write, in full: it is not there yet, or empty.

    Raises:
        ValueError: it holds something, or is a file.
    """
    folder = Path(name).resolve()
    if folder.is_file():
        raise ValueError(f"--output {name} is a file: give a folder")
    if folder.is_dir() and any(file.name != SCRATCH for file in folder.iterdir()):
        raise ValueError(f"--output {name} is not empty: give another folder, or empty it")
    return folder
