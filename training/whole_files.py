"""Files that are never half-written: after a kill there is the old file or the new one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields another name to write a file under, which takes the place of `path` when it is whole and on the disk.

    Several processes may do so at once.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file, and the folders above it where they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
