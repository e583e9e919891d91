"""Reads the records of one file: JSON, JSON lines (each also gzipped) or Parquet."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet")
_ROWS_AT_A_TIME = 256


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields (number from 1, parsed record or an error) for each record of a file.

    The number counts lines; in a Parquet file it counts rows, and in a JSON file with one array (ShareGPT's original
    form) it counts items. If the file is damaged, the last item is the error.
    """
    number = 0
    try:
        for number, record in _read_parquet(path) if path.suffix == ".parquet" else _read_json(path):
            yield number, record
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pyarrow.ArrowException) as error:
        yield number + 1, ValueError(f"the rest of the file cannot be read ({error})")


def drop_nulls(value: Any) -> Any:
    """Removes keys whose value is None at any depth: tables have every key in every row."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
            for number, row in enumerate(batch.to_pylist(), start=number + 1):  # noqa: B020 (counts on)
                yield number, {key: drop_nulls(value) for key, value in row.items()}


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    is_packed = path.suffix == ".gz"
    with gzip.open(path, "rt", encoding="utf-8-sig") if is_packed else path.open(encoding="utf-8-sig") as file:
        lines: Iterator[str] = iter(file)
        if path.name.removesuffix(".gz").endswith(".json"):
            text = file.read()
            if text.lstrip().startswith("["):
                try:
                    yield from enumerate(json.loads(text), start=1)
                except json.JSONDecodeError as error:
                    yield error.lineno, error
                return
            lines = iter(text.split("\n")[: -1 if text.endswith("\n") else None])
        for number, line in enumerate(lines, start=1):
            try:
                yield number, json.loads(line.rstrip()) if line.strip() else ValueError("the line is empty")
            except json.JSONDecodeError as error:
                yield number, ValueError(f"{error.msg}, column {error.colno}")
