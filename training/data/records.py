"""Reads the records of one file: JSON, JSON lines (each also gzipped) or Parquet."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet")
NUM_RANGES = 64  # of each reader in a large file
LEAST_RANGE = 2**16  # bytes of a range, which is many lines; smaller files are read whole
_FORMS = "a .json file has an array of records, one record, or one record a line"
_ROWS_AT_A_TIME = 256
_BLOCK = 2**20  # bytes in memory while lines are counted


@dataclass(frozen=True)
class Share:
    """Part `index` of the `count` parts of a file, each for one reader: every record is in one of them.

    Each reader keeps one of `count` records. It skips the other parts of a large file of JSON lines, which is cut into
    `NUM_RANGES` ranges of bytes for each reader, and of a Parquet file, of which each reader has a range of rows.
    """

    index: int = 0
    count: int = 1

    def has(self, number: int) -> bool:
        return number % self.count == self.index

    def cut(self, size: int) -> tuple[int, int]:
        """Begin and end of the part among `size` rows."""
        return size * self.index // self.count, size * (self.index + 1) // self.count

    def cut_finely(self, size: int) -> list[tuple[int, int]]:
        """Begins and ends of the part's ranges among `size` bytes. They lie all over the file, whose lines may be
        sorted by length: readers need about the same number of conversations."""
        total = self.count * NUM_RANGES
        return [(size * n // total, size * (n + 1) // total) for n in range(self.index, total, self.count)]


WHOLE = Share()


@dataclass(frozen=True)
class Line:
    """The place of a record: line (row, item) `number` of a file, from 1, counted from the byte `start`."""

    path: Path
    number: int
    start: int = 0

    def __str__(self) -> str:
        with self.path.open("rb") as file:
            sizes = (min(_BLOCK, self.start - place) for place in range(0, self.start, _BLOCK))
            earlier = sum(file.read(size).count(b"\n") for size in sizes)
        return f"{self.path}, line {earlier + self.number}"


def read_records(path: Path, share: Share = WHOLE) -> Iterator[tuple[Line, Any]]:
    """Yields (place, parsed record or an error) for each record of a file, or of a reader's part.

    Lines are counted; in a Parquet file rows, and in a JSON file with one array its items. If the file is damaged, the
    last item is the error.
    """
    line = Line(path, 0)
    form = path.name.removesuffix(".gz").rpartition(".")[2]
    read = {"parquet": _read_parquet, "jsonl": _read_lines, "json": _read_json}[form]
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
    """Reads JSON lines. Of a large file a line is in the range that its first byte is in."""
    is_packed = path.suffix == ".gz"
    size = path.stat().st_size
    with gzip.open(path) if is_packed else path.open("rb") as file:
        if share.count == 1 or is_packed or size < share.count * NUM_RANGES * LEAST_RANGE:
            yield from ((Line(path, number), _parse(line)) for number, line in enumerate(file, 1) if share.has(number))
            return
        for start, end in share.cut_finely(size):
            file.seek(max(0, start - 1))
            if start:
                start += len(file.readline()) - 1
            place = start
            for number, line in enumerate(file, start=1):
                if place >= end:
                    break
                place += len(line)
                yield Line(path, number, start), _parse(line)


def _parse(line: bytes | str) -> Any:
    try:
        text = (line.decode("utf-8-sig") if isinstance(line, bytes) else line).rstrip()
        return json.loads(text) if text else ValueError("the line is empty")
    except json.JSONDecodeError as error:
        return ValueError(f"{error.msg}, column {error.colno}")
    except UnicodeDecodeError as error:
        return error


def _read_json(path: Path, share: Share) -> Iterator[tuple[Line, Any]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        text = file.read().decode("utf-8-sig")
    records: Iterable[Any]
    try:
        value = json.loads(text)
        records = value if isinstance(value, list) else [value]
    except json.JSONDecodeError as error:
        lines = text.split("\n")[: -1 if text.endswith("\n") else None]
        has_records = any(line.startswith("{") and isinstance(_parse(line), dict) for line in lines)
        if text.lstrip().startswith("[") or not has_records:
            yield Line(path, error.lineno), ValueError(f"{error.msg}, column {error.colno}; {_FORMS}")
            return
        records = map(_parse, lines)
    yield from ((Line(path, number), record) for number, record in enumerate(records, 1) if share.has(number))
