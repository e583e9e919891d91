"""JSON lines: a journal that survives kills of the program that appends to it, and files that are replaced whole."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from draftsmith.training.whole_files import replacing


class JsonLinesJournal:
    """JSON lines to append to; one process writes each journal.

    A kill or a full disk leaves at most one torn line, at the end; the next start cuts it off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes whole lines; when it returns, they are on the disk."""
        view = memoryview("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        while view:
            view = view[self._file.write(view) :]
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal, which another process may be writing.

    Raises:
        ValueError: a line is not JSON.
    """
    return list(_parse_lines(path.read_bytes().split(b"\n")[:-1], path))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file that `write_lines` wrote, gzipped if its name ends in .gz.

    Raises:
        ValueError: a line is not JSON, or the file is not gzipped.
    """
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        try:
            yield from _parse_lines(lines, path)
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} cannot be read ({error}): choose another output") from error


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Writes a file whole or not at all; gzipped if the name ends in .gz."""
    with replacing(path) as scratch, scratch.open("wb") as file:
        if path.suffix == ".gz":
            # Without name and time, so that equal lines give equal bytes.
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed, io.BufferedWriter(packed) as buffered:
                buffered.writelines(lines)
        else:
            file.writelines(lines)


def _parse_lines(lines: Iterable[bytes], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}): choose another output") from error
        yield row
