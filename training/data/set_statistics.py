"""Counts the conversations, drops, tokens and lengths of each set that training would read."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import datasets

from training.data.chat_tokens import tokenize_with_problems
from training.data.conversations import Place, iterate_place, parse_row, read_place
from training.data.options import DataArguments

_QUANTILES = (0, 0.1, 0.5, 0.9, 0.99, 1)


@dataclass(frozen=True)
class SetStatistics:
    """Counts of one set, or of all together.

    Args:
        num_records: lines or rows that were read; each is a conversation or is in `dropped`.
        dropped: reason -> number of records, malformed lines included.
        num_turns: messages of the conversations; `num_replies` of them are the assistant's.
        num_tokens: tokens of the rows, cut to `max_length`; `num_trained_tokens` of them have a loss.
        num_at_max_length: rows of `max_length` tokens; most of them were cut.
        lengths: tokens of a row by quantile (0.5 = the median).
    """

    name: str
    num_records: int
    num_conversations: int
    dropped: dict[str, int]
    num_turns: int
    num_replies: int
    num_tokens: int
    num_trained_tokens: int
    num_at_max_length: int
    lengths: dict[str, int]

    @property
    def trained_share(self) -> float:
        return self.num_trained_tokens / max(self.num_tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "trained_share": round(self.trained_share, 4)}


@dataclass(frozen=True)
class MeasuredSet:
    """One set after reading: its usable rows, and the number of tokens of each."""

    statistics: SetStatistics
    rows: datasets.Dataset
    row_lengths: list[int]


def measure_sets(data_args: DataArguments, tokenizer: Any) -> list[MeasuredSet]:
    """Reads and counts each of `dataset`; of a stream, the first `vocabulary_rows` records of each.

    Raises:
        ValueError: a missing file, a set without a conversation, or an unusable tokenizer.
    """
    return [
        _measure_set(Place.find(name, split), data_args, tokenizer)
        for name, split in zip(data_args.dataset, data_args.splits, strict=True)
    ]


def total_statistics(measured: Sequence[MeasuredSet]) -> SetStatistics:
    """Adds up the counts of all sets."""
    parts = [each.statistics for each in measured]
    added = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in dataclasses.fields(SetStatistics)
        if field.name.startswith("num_")
    }
    dropped = sum((Counter(part.dropped) for part in parts), Counter())
    lengths = _quantiles([*chain.from_iterable(each.row_lengths for each in measured)])
    return SetStatistics(name="all", dropped=dict(dropped.most_common()), lengths=lengths, **added)


def _measure_set(place: Place, data_args: DataArguments, tokenizer: Any) -> MeasuredSet:
    records = _read(place, data_args)
    problems = records["problem"][:]
    conversations = records.select([row for row, problem in enumerate(problems) if not problem])
    dropped = Counter(_without_place(problem) for problem in problems if problem)
    if not len(conversations):
        first = next((problem for problem in problems if problem), "it is empty")
        raise ValueError(f"no conversation in {place.label}; the first problem: {first}")
    rows = tokenize_with_problems(
        conversations,
        tokenizer,
        max_length=data_args.max_length,
        num_proc=data_args.num_proc,
        train_on_thinking=data_args.train_on_thinking,
    )
    problems = rows["problem"][:]
    dropped.update(problem for problem in problems if problem)
    used = [row for row, problem in enumerate(problems) if not problem]
    rows, texts = rows.select(used), conversations.select(used)["conversation"]
    roles = [message["role"] for text in texts for message in json.loads(text)["messages"]]
    lengths = [len(ids) for ids in rows["input_ids"]]
    statistics = SetStatistics(
        name=place.label,
        num_records=len(records),
        num_conversations=len(rows),
        dropped=dict(dropped.most_common()),
        num_turns=len(roles),
        num_replies=roles.count("assistant"),
        num_tokens=sum(lengths),
        num_trained_tokens=sum(map(sum, rows["loss_mask"])),
        num_at_max_length=lengths.count(data_args.max_length),
        lengths=_quantiles(lengths),
    )
    return MeasuredSet(statistics, rows.remove_columns("problem"), lengths)


def _read(place: Place, data_args: DataArguments) -> datasets.Dataset:
    record_format = data_args.record_format()
    if data_args.streaming:
        records = islice(iterate_place(place), data_args.vocabulary_rows)
        return datasets.Dataset.from_list([parse_row(*record, record_format) for record in records])
    return datasets.concatenate_datasets([*read_place(place, record_format, max_samples=data_args.max_samples)])


def _without_place(problem: str) -> str:
    """Removes the file and line at its beginning, so that equal problems are counted together."""
    place, _, reason = problem.partition(": ")
    return reason if "line " in place or "row " in place else problem


def _quantiles(lengths: list[int]) -> dict[str, int]:
    ordered, last = sorted(lengths), len(lengths) - 1
    return {f"{share:g}": ordered[round(share * last)] for share in _QUANTILES} if lengths else {}
