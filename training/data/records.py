"""Reads the records of one file: JSON, JSON lines (each also gzipped) or Parquet."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from draftsmith.training.data.layouts import LAYOUTS

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet")
_FORMS = "a .json file has an array of records, one record, an object whose list `data` has them, or one record a line"
_ROWS_AT_A_TIME = 256


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (file and line, parsed record or an error) for each record of a file.

    Lines are counted; in a Parquet file rows, and in a JSON file with one value its records: the items of an array
    (ShareGPT's original form), or of the list `data` of an object. Any other object is one record. If the file is
    damaged, the last item is the error.
    """
    number = 0
    form = path.name.removesuffix(".gz").rpartition(".")[2]
    read = {"parquet": _read_parquet, "jsonl": _read_lines, "json": _read_json}[form]
    try:
        for number, record in read(path):
            yield f"{path}, line {number}", record
        if number == 0:  # `datasets` has no tables without rows
            yield f"{path}, line 1", ValueError("the file is empty")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pyarrow.ArrowException) as error:
        yield f"{path}, line {number + 1}", ValueError(f"the rest of the file cannot be read ({error})")


def drop_nulls(value: Any) -> Any:
    """Removes keys whose value is None at any depth: tables have every key in every row."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    with pyarrow.parquet.ParquetFile(path) as file:
        rows = (row for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield number, {key: drop_nulls(value) for key, value in row.items()}


def _read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield from _parse_lines(file)


def _parse_lines(lines: Iterable[bytes | str]) -> Iterator[tuple[int, Any]]:
    """The lines by number, without blank ones at the end."""
    blank: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            blank.append(number)
            continue
        yield from ((each, ValueError("the line is empty")) for each in blank)
        blank.clear()
        yield number, _parse(line)


def _parse(line: bytes | str) -> Any:
    try:
        text = (line.decode("utf-8-sig") if isinstance(line, bytes) else line).rstrip()
        return json.loads(text) if text else ValueError("the line is empty")
    except json.JSONDecodeError as error:
        return ValueError(f"{error.msg}, column {error.colno}")
    except UnicodeDecodeError as error:
        return error


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        text = file.read().decode("utf-8-sig")
    try:
        records = _find_records(json.loads(text))
    except json.JSONDecodeError as error:
        lines = text.split("\n")
        has_records = any(line.startswith("{") and isinstance(_parse(line), dict) for line in lines)
        if text.lstrip().startswith("[") or not has_records:
            yield error.lineno, ValueError(f"{error.msg}, column {error.colno}; {_FORMS}")
            return
        yield from _parse_lines(lines)
        return
    yield from enumerate(records, 1)


def _find_records(value: Any) -> list[Any]:
    """The records of a JSON file with one value. A list `data` of texts or turns is a conversation. An object with the
    columns of another layout beside `data` is one record."""
    if isinstance(value, list):
        return value
    is_record = not isinstance(value, dict) or any(
        all(value.get(column) is not None for column in layout.required)
        for layout in LAYOUTS.values()
        if layout.turns != "data"
    )
    data = None if is_record else value.get("data")
    has_records = isinstance(data, list) and all(
        isinstance(item, dict) and not {"role", "from"} & item.keys() for item in data
    )
    return data if data is not None and has_records else [value]
