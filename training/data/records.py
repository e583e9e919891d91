"""Reads the records of one file: JSON, JSON lines (each also gzipped) or Parquet."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet")
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True)
class Share:
    """Part `index` of the `count` parts of a file, each for one reader: every record is in one of them.

    A part of JSON lines is a range of bytes, and of a Parquet file a range of rows: a reader skips the rest. Other
    files are read whole, and each reader keeps one of `count` records.
    """

    index: int = 0
    count: int = 1

    def has(self, number: int) -> bool:
        return number % self.count == self.index

    def cut(self, size: int) -> tuple[int, int]:
        """Begin and end of the part among `size` bytes or rows."""
        return size * self.index // self.count, size * (self.index + 1) // self.count


WHOLE = Share()


@dataclass(frozen=True)
class Line:
    """The place of a record: line (row, item) `number` of a file, from 1, counted from the byte `start`."""

    path: Path
    number: int
    start: int = 0

    def __str__(self) -> str:
        with self.path.open("rb") as file:
            earlier = file.read(self.start).count(b"\n") if self.start else 0
        return f"{self.path}, line {earlier + self.number}"


def read_records(path: Path, share: Share = WHOLE) -> Iterator[tuple[Line, Any]]:
    """Yields (place, parsed record or an error) for each record of a file, or of a reader's part.

    Lines are counted; in a Parquet file rows, and in a JSON file with one array (ShareGPT's original form) its items.
    If the file is damaged, the last item is the error.
    """
    line = Line(path, 0)
    read = _read_parquet if path.suffix == ".parquet" else _read_lines if path.suffix == ".jsonl" else _read_json
    try:
        for line, record in read(path, share):
            yield line, record
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pyarrow.ArrowException) as error:
        problem = ValueError(f"the rest of the file cannot be read ({error})")
        yield replace(line, number=line.number + 1), problem


def drop_nulls(value: Any) -> Any:
    """Removes keys whose value is None at any depth: tables have every key in every row."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def _read_parquet(path: Path, share: Share) -> Iterator[tuple[Line, Any]]:
    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        begin, end = share.cut(file.metadata.num_rows)
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if number + size <= begin or number >= end:
                number += size
                continue
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME, row_groups=[group]):
                for number, row in enumerate(batch.to_pylist(), start=number + 1):  # noqa: B020 (counts on)
                    if begin < number <= end:
                        yield Line(path, number), {key: drop_nulls(value) for key, value in row.items()}


def _read_lines(path: Path, share: Share) -> Iterator[tuple[Line, Any]]:
    """Reads JSON lines; a line is in the part that its first byte is in."""
    start, end = share.cut(path.stat().st_size)
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            start += len(file.readline()) - 1
        place = start
        for number, line in enumerate(file, start=1):
            if place >= end:
                return
            place += len(line)
            yield Line(path, number, start), _parse(line.decode("utf-8-sig"))


def _parse(line: str) -> Any:
    try:
        return json.loads(line.rstrip()) if line.strip() else ValueError("the line is empty")
    except json.JSONDecodeError as error:
        return ValueError(f"{error.msg}, column {error.colno}")


def _read_json(path: Path, share: Share) -> Iterator[tuple[Line, Any]]:
    is_packed = path.suffix == ".gz"
    with gzip.open(path, "rt", encoding="utf-8-sig") if is_packed else path.open(encoding="utf-8-sig") as file:
        lines: Iterator[str] = iter(file)
        if path.name.removesuffix(".gz").endswith(".json"):
            text = file.read()
            if text.lstrip().startswith("["):
                try:
                    items = json.loads(text)
                except json.JSONDecodeError as error:
                    yield Line(path, error.lineno), error
                    return
                yield from ((Line(path, number), item) for number, item in enumerate(items, 1) if share.has(number))
                return
            lines = iter(text.split("\n")[: -1 if text.endswith("\n") else None])
        for number, line in enumerate(lines, start=1):
            if share.has(number):
                yield Line(path, number), _parse(line)
