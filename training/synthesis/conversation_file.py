"""JSON lines: a journal that survives kills of the program that appends to it, and files that are replaced whole."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)


class JsonLinesJournal:
    """JSON lines to append to, one process at a time; `rows` are the lines that were there at the start.

    A kill or a full disk leaves at most one torn line, at the end; the next start cuts it off.

    Raises:
        ValueError: a line before the last is not JSON, or another process has the file open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        try:
            _lock(self._file, path)
            rows, whole, size = _read_whole_lines(path)
            if len(whole) != size:
                logger.warning("%s: removed the last line, which was incomplete", path)
                self._file.truncate(len(whole))
            if whole and not whole.endswith(b"\n"):
                self._write(b"\n")
        except BaseException:
            self._file.close()
            raise
        self.rows = rows

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes whole lines; when it returns, they are on the disk.

        Raises:
            OSError: they could not be written; earlier lines are safe.
        """
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        if data:
            self._write(data)

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:  # not through Python's buffer, which would try again when the file is closed
            view = view[os.write(self._file.fileno(), view) :]
        os.fsync(self._file.fileno())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a journal that another process may be writing."""
    return _read_whole_lines(path)[0]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file that `replacing` wrote, gzipped if its name ends in .gz.

    Raises:
        ValueError: a line is not JSON, or the file is not gzipped.
    """
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        try:
            yield from _parse_lines(lines, path)
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} cannot be read ({error}): choose another output") from error


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that replaces `path` when everything has been written; gzipped if the name ends in .gz."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as raw:
            if path.suffix == ".gz":
                # Without name and time, so that equal lines give equal bytes.
                with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed, io.BufferedWriter(packed) as lines:
                    yield lines
            else:
                yield raw
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_whole_lines(path: Path) -> tuple[list[dict[str, Any]], bytes, int]:
    """Returns whole lines (the last may lack its line break), parsed and as bytes, and the size of the file."""
    data = path.read_bytes()
    *lines, tail = data.split(b"\n")
    rows = list(_parse_lines(lines, path))
    if tail:
        try:
            rows.append(_parse_object(tail))  # a torn object is never a whole one
        except ValueError:
            return rows, data[: len(data) - len(tail)], len(data)
    return rows, data, len(data)


def _parse_lines(lines: Iterable[bytes], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            yield _parse_object(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}): correct it, or choose another output"
            ) from error


def _parse_object(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    return row


def _lock(file: IO[bytes], path: Path) -> None:
    """Keeps a second program from appending to the file."""
    try:
        import fcntl  # which Windows does not have

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"another process is writing {path}: wait for it, or give every process its own --shard_index"
        ) from None
    except (ImportError, OSError) as error:  # Windows, and some network file systems
        logger.info("%s cannot be locked (%s)", path, error)
