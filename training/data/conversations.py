"""Reads conversations from files, folders and hub ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetGenerationError

from draftsmith.inference.targets.files import is_missing, naming_place
from draftsmith.training.data.layouts import AUTO, RecordFormat, parse_record
from draftsmith.training.data.records import SUFFIXES, drop_nulls, read_records

logger = logging.getLogger(__name__)

# A conversation is one text, the JSON of `draftsmith.training.data.layouts.parse_record`: tool calls fit no fixed
# columns.
_PARSED = datasets.Features({"conversation": datasets.Value("string"), "problem": datasets.Value("string")})
# A conversation with images begins so.
IMAGES_FIRST = '{"media": ['
# Part of the cache key of parsed files: raise it when the code below gives another result.
_CACHE_VERSION = 10
_ROWS_AT_A_TIME = 256


class BadLineError(ValueError):
    """A line that holds no conversation; the message names the file and the line."""


@dataclass(frozen=True)
class Place:
    """Where conversations are: local files, or a repository that `datasets.load_dataset` reads.

    Args:
        repository: a hub id, or a folder with a copy of a hub repository.
        subset, split: of the repository; "" = its only subset.
    """

    name: str
    files: tuple[Path, ...] = ()
    repository: str = ""
    subset: str = ""
    split: str = "train"

    @classmethod
    def find(cls, name: str, split: str = "train", *, option: str = "dataset") -> Place:
        """Returns the place of a name that the user gave for `option`.

        Raises:
            ValueError: the name looks like a local path, and nothing is there, or a file with none of `SUFFIXES`.
        """
        path = Path(name).expanduser()
        if path.is_file():
            if not path.name.endswith(SUFFIXES):
                raise ValueError(
                    f"{option} {name} is a file whose name ends in none of {', '.join(SUFFIXES)}: give JSON lines, one "
                    "conversation a line, in a file named so (docs/data.md)"
                )
            return cls(name, files=(path,))
        repository, _, subset = (name, "", "") if path.exists() or "://" in name else name.partition(":")
        if not repository.strip():
            raise ValueError(f"{option} is {name!r}, which names nothing; give an existing file or folder, or a hub id")
        folder = Path(repository).expanduser()
        if folder.is_dir():
            files = tuple(sorted(file for file in folder.iterdir() if file.name.endswith(SUFFIXES)))
            if files and not subset and not _has_dataset_card(folder):
                return cls(name, files=files)
            if not any(file.name.endswith(SUFFIXES) for file in folder.rglob("*")):
                raise ValueError(f"{name} has no files ending in {', '.join(SUFFIXES)}")
            return cls(name, repository=str(folder), subset=subset, split=split)
        if path.name.endswith(SUFFIXES) or is_missing(repository):
            raise ValueError(f"{option} {name} does not exist; give an existing file or folder, or a hub id")
        return cls(name, repository=repository, subset=subset, split=split)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.split})" if self.repository else self.name

    def load_repository(self, *, streaming: bool = False) -> Any:
        """Calls `datasets.load_dataset`.

        Raises:
            ValueError: no such repository, subset or split, or a damaged file in it.
        """
        with naming_place(self.repository):
            try:
                subset, load = self.subset or None, datasets.load_dataset
                return _keep_bytes(load(self.repository, subset, split=self.split, streaming=streaming))
            except DatasetGenerationError as error:
                raise ValueError(f"{self.label} cannot be read: {error.__cause__ or error}") from error
            except ValueError as error:
                hint = "" if self.subset else f". A subset is named {self.repository}:SUBSET, a split --dataset_split"
                raise ValueError(f"{self.label} cannot be read: {' '.join(str(error).split())}{hint}") from error


def load_conversations(
    paths: Sequence[str],
    *,
    splits: Sequence[str] = (),
    max_samples: int | None = None,
    skip_bad_lines: bool = False,
    record_format: RecordFormat = AUTO,
    option: str = "dataset",
) -> datasets.Dataset:
    """Reads conversations of files, folders and hub ids, in order, into a dataset with the column `conversation`.

    `datasets` keeps the result in its cache, memory-mapped, until a file changes.

    Args:
        splits: of the hub id at each path (files have none); () = train.
        max_samples: the number of conversations to use, of all paths together; None = all.
        skip_bad_lines: count malformed lines in a warning instead of raising at the first one.
        option: the option that gave the paths, for messages.

    Raises:
        ValueError: a missing file, a folder without data, a malformed line (`BadLineError`), or no conversation.
    """
    parts, missing, first_problem = [], max_samples, ""
    places = map(partial(Place.find, option=option), paths, splits or ["train"] * len(paths))
    for part in (part for place in places for part in read_place(place, record_format, missing)):
        problems = [problem for problem in part["problem"] if problem]
        if problems and not skip_bad_lines:
            raise BadLineError(f"{problems[0]}. Correct it, or skip such lines with --skip_bad_lines true")
        if problems:
            first_problem = first_problem or f"; the first malformed line: {problems[0]}"
            logger.warning("skipped %d malformed lines; the first: %s", len(problems), problems[0])
            part = part.select([row for row, problem in enumerate(part["problem"]) if not problem])
        if missing is not None:
            missing -= len(part)
        if len(part):
            parts.append(part.remove_columns("problem"))
        if missing == 0:
            break
    if not parts:
        raise ValueError(f"no conversations in {', '.join(paths)} (max_samples={max_samples}){first_problem}")
    return datasets.concatenate_datasets(parts)


def read_place(
    place: Place, record_format: RecordFormat = AUTO, max_samples: int | None = None
) -> Iterator[datasets.Dataset]:
    """Yields one dataset per file, or one for a repository: `conversation` (JSON) and `problem` (empty = a good line).

    Args:
        max_samples: the number of good lines to read of all files together; None = all.
    """
    for source in place.files or (place.load_repository(),):
        if max_samples == 0:
            return
        key: dict[str, Any] = {"version": _CACHE_VERSION}
        if isinstance(source, Path):
            stat, source = source.stat(), source.resolve()
            key |= {"size": stat.st_size, "changed": stat.st_mtime_ns}
        # `datasets` hashes the arguments into the cache key, so they hold everything that the result depends on.
        arguments = {"source": source, "label": place.label, "record_format": record_format, "max_samples": max_samples}
        part = datasets.Dataset.from_generator(_generate_rows, features=_PARSED, gen_kwargs={**arguments, "key": key})
        if max_samples is not None:
            max_samples -= count_good(part)
        yield part


def count_good(part: datasets.Dataset) -> int:
    """The conversations of a dataset from `read_place`."""
    return sum(not problem for problem in part["problem"])


def iterate_place(
    place: Place, files: Sequence[Path] | None = None, *, reader: int = 0, num_readers: int = 1
) -> Iterator[tuple[str, Any]]:
    """Yields (file and line, record or an error) for each record, without a cache.

    Args:
        files: those of the place, in the order of reading.
        reader: one of `num_readers`: each record is read by one of them.
    """
    if place.repository:
        rows = place.load_repository(streaming=True)
        if num_readers > 1:
            rows = split_dataset_by_node(rows, rank=reader, world_size=num_readers)
        yield from _read(_iterate_rows(rows), place.label)
    records = (record for file in (place.files if files is None else files) for record in _read(file, place.label))
    yield from islice(records, reader, None, num_readers)


def _iterate_rows(rows: Any) -> Iterator[dict[str, Any]]:
    """The rows of an iterable dataset. Plain iteration would split them among DataLoader workers once more."""
    for batch in rows.iter(_ROWS_AT_A_TIME):
        yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))


def _keep_bytes(rows: Any) -> Any:
    """Rows whose images are not decoded."""
    for name, feature in (rows.features or {}).items():
        item = getattr(feature, "feature", feature)
        if isinstance(item, datasets.Image):
            plain = datasets.Image(decode=False)
            rows = rows.cast_column(name, plain if item is feature else datasets.Sequence(plain))
    return rows


def parse_row(where: str, record: Any, record_format: RecordFormat, folder: Path | None = None) -> dict[str, str]:
    """Returns a record as `conversation` (JSON) and `problem` (`where` and why, or empty).

    Args:
        folder: where relative paths of images begin, if `record_format` names no other.
    """
    try:
        if isinstance(record, Exception):
            raise ValueError(str(record))
        conversation = json.dumps(parse_record(record, record_format, folder), ensure_ascii=False)
        conversation.encode()  # half a surrogate pair is valid JSON, but not valid text
    except ValueError as error:
        return {"conversation": "", "problem": f"{where}: {error}"}
    return {"conversation": conversation, "problem": ""}


def _read(source: Any, label: str) -> Iterator[tuple[str, Any]]:
    """Yields (where, record or an error) for each line of a file, or each row of a table."""
    if isinstance(source, Path):
        yield from read_records(source)
        return
    for number, row in enumerate(source, start=1):
        yield f"{label}, row {number}", {key: drop_nulls(value) for key, value in row.items()}


def _generate_rows(
    source: Any, label: str, record_format: RecordFormat, max_samples: int | None, key: dict[str, int]
) -> Iterator[dict[str, str]]:
    """Good and bad lines, so that the cached result serves with and without `skip_bad_lines`."""
    num_good = 0
    folder = source.parent if isinstance(source, Path) else None
    for where, record in _read(source, label):
        if num_good == max_samples:
            break
        row = parse_row(where, record, record_format, folder)
        num_good += not row["problem"]
        yield row


def _has_dataset_card(folder: Path) -> bool:
    """Whether a folder is a copy of a hub repository: its README then begins with metadata, and it has splits."""
    card = folder / "README.md"
    return card.is_file() and card.read_text(encoding="utf-8", errors="replace").startswith("---")
