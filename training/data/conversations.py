"""Reading conversations: files, folders and hub ids, in the layouts people keep them in."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from training.data.layouts import AUTO, RecordFormat, parse_record
from training.data.records import SUFFIXES, drop_nulls, read_records

logger = logging.getLogger(__name__)

# A conversation is one text, the JSON of `training.data.layouts.parse_record`: tool calls fit no fixed columns.
_PARSED = datasets.Features({"conversation": datasets.Value("string"), "problem": datasets.Value("string")})
# Part of the cache key of what is read: raise it when the code below gives another result.
_CACHE_VERSION = 4


# What writing alone fails with: a disk, a quota or a file that is full; a disk that is read-only.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class BadLineError(ValueError):
    """A line that is no conversation; the message names file and line."""


@dataclass(frozen=True)
class Place:
    """Where conversations are: local files, or what `datasets.load_dataset` reads (a hub id or a copy of its folder).

    Args:
        name: as it was given.
        files: the local files in order; empty = `repository` is read.
        repository: hub id or folder.
        subset: name of its configuration, "" = its only one.
        split: of the repository; files have none.
    """

    name: str
    files: tuple[Path, ...] = ()
    repository: str = ""
    subset: str = ""
    split: str = "train"

    @classmethod
    def find(cls, name: str, split: str = "train", *, option: str = "dataset") -> Place:
        """What a name given by the user, as `option`, stands for.

        Raises:
            ValueError: it looks local, and nothing is there.
        """
        path = Path(name).expanduser()
        if path.is_file():
            return cls(name, files=(path,))
        repository, _, subset = (name, "", "") if path.exists() else name.partition(":")
        folder = Path(repository).expanduser()
        if folder.is_dir():
            files = tuple(sorted(file for file in folder.iterdir() if file.name.endswith(SUFFIXES)))
            if files and not subset and not _has_dataset_card(folder):
                return cls(name, files=files)
            if not any(file.name.endswith(SUFFIXES) for file in folder.rglob("*")):
                raise ValueError(f"{name} has no files ending in {', '.join(SUFFIXES)}")
            return cls(name, repository=str(folder), subset=subset, split=split)
        if path.name.endswith(SUFFIXES) or name.startswith((".", "/", "~")):
            raise ValueError(f"{option} {name} does not exist; give an existing file or folder, or a hub id")
        return cls(name, repository=repository, subset=subset, split=split)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.split})" if self.repository else self.name

    def load_repository(self, *, streaming: bool = False) -> Any:
        """`datasets.load_dataset`, whose errors become ours.

        Raises:
            ValueError, OSError: no such repository, subset or split, or a damaged file in it.
        """
        try:
            return datasets.load_dataset(self.repository, self.subset or None, split=self.split, streaming=streaming)
        except DatasetGenerationError as error:
            if isinstance(cause := error.__cause__, OSError) and cause.errno in _FULL:
                raise _explain_cache(cause, self.label) from error
            raise ValueError(f"{self.label} cannot be read: {error.__cause__ or error}") from error
        except ValueError as error:
            hint = "" if self.subset else f". A subset is named {self.repository}:SUBSET, a split --dataset_split"
            raise ValueError(f"{self.label} cannot be read: {' '.join(str(error).split())}{hint}") from error


def load_conversations(
    paths: Sequence[str],
    *,
    split: str = "train",
    max_samples: int | None = None,
    skip_bad_lines: bool = False,
    record_format: RecordFormat = AUTO,
) -> datasets.Dataset:
    """Conversations of files, folders and hub ids, in order, as a dataset with the column `conversation`.

    What was read is kept in the cache of `datasets` and mapped into memory from there, until a file changes.

    Args:
        paths: JSON, JSON-lines (both also gzipped) or Parquet files, folders of such files, hub ids (ID or ID:SUBSET).
        split: which split of a hub id; files have none.
        max_samples: keep the first so many.
        skip_bad_lines: count and skip malformed lines instead of raising.
        record_format: which columns hold the conversations.

    Raises:
        ValueError: a missing file, no conversation at all, or (BadLineError) a malformed line, with file and line.
        OSError: the cache cannot be written.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}; give a number of at least 1, or none for all")
    parts: list[datasets.Dataset] = []
    missing = max_samples
    first_problem = ""
    for part in (part for path in paths for part in read_place(Place.find(path, split), record_format, max_samples)):
        problems = [problem for problem in part["problem"] if problem]
        if problems and not skip_bad_lines:
            raise BadLineError(f"{problems[0]}. Mend it, or skip such lines with --skip_bad_lines true")
        if problems:
            first_problem = first_problem or f"; the first malformed line: {problems[0]}"
            logger.warning("skipped %d malformed lines; the first: %s", len(problems), problems[0])
            part = part.select([row for row, problem in enumerate(part["problem"]) if not problem])
        if missing is not None:
            part = part.select(range(min(missing, len(part))))
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
    """One dataset of `conversation` (JSON) and `problem` (empty for a good line) for each file, or for a repository.

    Args:
        max_samples: so many good lines are enough (of each file).
    """
    if place.repository:
        rows = place.load_repository()
        num_read = len(rows) if max_samples is None else min(len(rows), max_samples)
        while True:
            parsed = rows.select(range(num_read)).map(
                _parse_row, with_indices=True, features=_PARSED, remove_columns=rows.column_names,
                fn_kwargs={"name": place.label, "record_format": record_format, "version": _CACHE_VERSION},
                desc="Reading conversations",
            )  # fmt: skip
            num_missing = (max_samples or 0) - parsed["problem"][:].count("")
            if num_missing <= 0 or num_read == len(rows):
                break
            num_read = min(len(rows), num_read + 2 * num_missing)
        yield parsed
    for file in place.files:
        stat = file.stat()
        # Everything the result depends on is an argument, because the arguments are the key of the cache.
        key = {"size": stat.st_size, "changed": stat.st_mtime_ns, "version": _CACHE_VERSION}
        arguments = {"file": str(file.resolve()), "record_format": record_format, "max_samples": max_samples}
        try:
            rows = datasets.Dataset.from_generator(
                _generate_rows, features=_PARSED, gen_kwargs={**arguments, "key": key}
            )
        except (DatasetGenerationError, OSError) as error:
            cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
            if isinstance(cause, OSError):  # of writing: those of reading are rows (`read_records`)
                raise _explain_cache(cause, str(file)) from error
            raise
        yield rows


def _explain_cache(error: OSError, name: str) -> OSError:
    """What to do when what is read cannot be written where it is kept."""
    return OSError(
        f"{name} cannot be taken into the cache of `datasets`, {datasets.config.HF_DATASETS_CACHE} "
        f"({error.strerror or error}): make room there, or name another folder with the environment variable "
        "HF_DATASETS_CACHE (streaming stores nothing)"
    )


def iterate_place(
    place: Place, record_format: RecordFormat, files: Sequence[Path]
) -> Iterator[Callable[[], dict[str, str]]]:
    """Functions that parse one record after the other into the columns of `read_place`, without a cache.

    Args:
        files: those of the place in the order in which they are to be read.
    """
    if place.repository:
        for index, row in enumerate(place.load_repository(streaming=True)):
            yield partial(_parse_row, row, index, place.label, record_format, _CACHE_VERSION)
    for file in files:
        number = 0
        for number, record in read_records(file):
            yield partial(parse_row, record, f"{file}, line {number}", record_format)
        if number == 0:
            yield partial(parse_row, ValueError("the file is empty"), f"{file}, line 1", record_format)


def parse_row(record: Any, where: str, record_format: RecordFormat) -> dict[str, str]:
    """A record as `conversation` (JSON) and `problem`: `where` it stands and what is wrong with it, or empty."""
    try:
        if isinstance(record, Exception):
            raise ValueError(str(record))
        conversation = json.dumps(parse_record(record, record_format), ensure_ascii=False)
        conversation.encode()  # half a surrogate pair is JSON, and no text
    except ValueError as error:
        return {"conversation": "", "problem": f"{where}: {error}"}
    return {"conversation": conversation, "problem": ""}


def _parse_row(row: dict[str, Any], index: int, name: str, record_format: RecordFormat, version: int) -> dict[str, str]:
    record = {key: drop_nulls(value) for key, value in row.items()}
    return parse_row(record, f"{name}, row {index + 1}", record_format)


def _generate_rows(
    file: str, record_format: RecordFormat, max_samples: int | None, key: dict[str, int]
) -> Iterator[dict[str, str]]:
    """Good and bad lines alike, so that the cached result can be used with and without `skip_bad_lines`."""
    num_good = number = 0
    for number, record in read_records(Path(file)):
        if num_good == max_samples:
            break
        row = parse_row(record, f"{file}, line {number}", record_format)
        num_good += not row["problem"]
        yield row
    if number == 0:  # `datasets` has no tables without rows
        yield {"conversation": "", "problem": f"{file}, line 1: the file is empty"}


def _has_dataset_card(folder: Path) -> bool:
    """Whether a folder is a copy of a hub repository: it then has splits, and its README begins with metadata."""
    card = folder / "README.md"
    return card.is_file() and card.read_text(encoding="utf-8", errors="replace").startswith("---")
