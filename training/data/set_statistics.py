"""Counts the conversations, drops, tokens and lengths of each set that training would read."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import datasets
import pyarrow.compute

from draftsmith.training.data.chat_tokens import count_problems, tokenize_conversations
from draftsmith.training.data.conversations import Place, count_good, iterate_place, parse_row, read_place
from draftsmith.training.data.options import DataArguments
from draftsmith.training.data.streaming import VOCABULARY_ROWS

_QUANTILES = (0, 0.1, 0.5, 0.9, 0.99, 1)


@dataclass(frozen=True)
class MeasuredSet:
    """One set after reading, or all together.

    Attributes:
        num_records: lines or rows that were read; each is a conversation or is in `dropped`.
        dropped: reason -> number of records, malformed lines included.
        notes: what is not learned in the conversations (`draftsmith.training.data.learned_turns`) -> how often.
        turns: role -> number of messages of the conversations.
        rows: the usable rows, `input_ids` and `loss_mask`.
    """

    name: str
    num_records: int
    dropped: Counter[str]
    notes: Counter[str]
    turns: Counter[str]
    rows: datasets.Dataset

    def count(self, max_length: int) -> dict[str, Any]:
        """Returns all counts. `lengths` are the tokens of a row by quantile (0.5 = the median)."""
        lengths = sorted(row_lengths(self.rows))
        num_tokens, num_trained = sum(lengths), count_trained(self.rows)
        return {
            "name": self.name,
            "num_records": self.num_records,
            "num_conversations": len(lengths),
            "dropped": dict(self.dropped.most_common()),
            "notes": dict(self.notes.most_common()),
            "num_turns": self.turns.total(),
            "num_replies": self.turns["assistant"],
            "num_tokens": num_tokens,
            "num_trained_tokens": num_trained,
            "trained_share": round(num_trained / max(num_tokens, 1), 4),
            "num_at_max_length": lengths.count(max_length),
            "lengths": {f"{share:g}": lengths[round(share * (len(lengths) - 1))] for share in _QUANTILES if lengths},
        }


def row_lengths(rows: datasets.Dataset) -> list[int]:
    """Tokens of each row."""
    lengths: list[int] = []
    for batch in rows.with_format("arrow").iter(1000):
        lengths += batch["input_ids"].combine_chunks().value_lengths().to_pylist()
    return lengths


def count_trained(rows: datasets.Dataset) -> int:
    """Tokens of all rows that have a loss."""
    masks = (batch["loss_mask"].combine_chunks().flatten() for batch in rows.with_format("arrow").iter(1000))
    return sum(pyarrow.compute.sum(mask).as_py() or 0 for mask in masks)


def measure_sets(data_args: DataArguments, tokenizer: Any) -> list[MeasuredSet]:
    """Reads each of `dataset`, up to `max_samples`; of a stream, the first `VOCABULARY_ROWS` records of each.

    Raises:
        ValueError: a missing file, a set without a conversation, or an unusable tokenizer.
    """
    measured, missing = [], data_args.max_samples
    for name, split in zip(data_args.dataset, data_args.splits, strict=True):
        if missing == 0:
            break
        place = Place.find(name, split)
        records = _read(place, data_args, missing)
        measured.append(_measure_set(place.label, records, data_args, tokenizer))
        if missing is not None:
            missing -= count_good(records)
    return measured


def join_sets(parts: Sequence[MeasuredSet]) -> MeasuredSet:
    """All sets together."""
    return MeasuredSet(
        name="all",
        num_records=sum(part.num_records for part in parts),
        dropped=sum((part.dropped for part in parts), Counter()),
        notes=sum((part.notes for part in parts), Counter()),
        turns=sum((part.turns for part in parts), Counter()),
        rows=datasets.concatenate_datasets([part.rows for part in parts]),
    )


def _measure_set(name: str, records: datasets.Dataset, data_args: DataArguments, tokenizer: Any) -> MeasuredSet:
    problems = records["problem"][:]
    conversations = records.select([row for row, problem in enumerate(problems) if not problem])
    dropped = Counter(_without_place(problem) for problem in problems if problem)
    if not len(conversations):
        first = next((problem for problem in problems if problem), "it is empty")
        raise ValueError(f"no conversation in {name}; the first problem: {first}")
    rows = tokenize_conversations(
        conversations,
        tokenizer,
        max_length=data_args.max_length,
        num_proc=data_args.num_proc,
        skip_bad_lines=True,
    )
    unusable, notes, used = count_problems(rows)
    dropped.update(unusable)
    texts = conversations.select(used)["conversation"]
    turns = Counter(message["role"] for text in texts for message in json.loads(text)["messages"])
    rows = rows.select(used).remove_columns(["problem", "notes"])
    return MeasuredSet(name, len(records), dropped, notes, turns, rows)


def _read(place: Place, data_args: DataArguments, max_samples: int | None) -> datasets.Dataset:
    record_format = data_args.record_format()
    if data_args.streaming:
        records = islice(iterate_place(place), VOCABULARY_ROWS)
        return datasets.Dataset.from_list([parse_row(*record, record_format) for record in records])
    return datasets.concatenate_datasets([*read_place(place, record_format, max_samples)])


def _without_place(problem: str) -> str:
    """Removes the file and line at its beginning, so that equal problems are counted together."""
    place, _, reason = problem.partition(": ")
    return reason if "line " in place or "row " in place else problem


def describe_size(num_bytes: float) -> str:
    """
    >>> describe_size(24), describe_size(2_400), describe_size(31.4e9)
    ('24 bytes', '2.4 kB', '31.4 GB')
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
