"""What training would see of each set: conversations, what is dropped and why, tokens, lengths."""

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
from training.data.conversations import Place, iterate_place, read_place
from training.data.options import DataArguments
from training.data.training_sets import count_draws, count_learned

_QUANTILES = (0, 0.1, 0.5, 0.9, 0.99, 1)


@dataclass(frozen=True)
class SetStatistics:
    """Counts of one set, or of all together.

    Args:
        num_records: lines or rows that were read; each is a conversation or is in `dropped`.
        dropped: reason -> how many; malformed lines are one of them.
        num_turns: messages of the conversations, `num_replies` of them by the assistant.
        num_tokens: those of the rows, cut to `max_length`; `num_trained_tokens` of them have a loss.
        num_at_max_length: rows of as many tokens as there may be, most of which are cut.
        lengths: tokens of a row, by quantile (0.5 = the median).
        num_draws: conversations that an epoch of the mixture takes; all of them without weights.
        num_lost_thoughts: replies whose thoughts the chat template drops even where they are a conversation's last.
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
    num_draws: int
    num_lost_thoughts: int

    @property
    def trained_share(self) -> float:
        return self.num_trained_tokens / max(self.num_tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "trained_share": round(self.trained_share, 4)}


@dataclass(frozen=True)
class MeasuredSet:
    """One set as it was read: `rows` are those that can be used, `row_lengths` their tokens."""

    statistics: SetStatistics
    rows: datasets.Dataset
    row_lengths: list[int]


def measure_sets(data_args: DataArguments, tokenizer: Any, *, seed: int) -> list[MeasuredSet]:
    """Each of `dataset`, counted. Of a stream, the first `vocabulary_rows` records of each.

    Args:
        seed: of the training run, which draws a mixture's conversations with it.

    Raises:
        ValueError: a missing file, a tokenizer that cannot be used.
    """
    measured = [
        _measure_set(Place.find(name, split), data_args, tokenizer)
        for name, split in zip(data_args.dataset, data_args.splits, strict=True)
    ]
    sizes = [each.statistics.num_conversations for each in measured]
    if not data_args.dataset_weights or data_args.streaming or 0 in sizes:
        return measured
    draws = count_draws(count_learned(sizes, data_args), data_args, seed=seed)
    return [
        dataclasses.replace(each, statistics=dataclasses.replace(each.statistics, num_draws=count))
        for each, count in zip(measured, draws, strict=True)
    ]


def total_statistics(measured: Sequence[MeasuredSet]) -> SetStatistics:
    """All sets together, each counted once."""
    parts = [each.statistics for each in measured]
    added = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in dataclasses.fields(SetStatistics)
        if field.name.startswith("num_")
    }
    dropped = sum((Counter(part.dropped) for part in parts), Counter())
    lengths = _quantiles(sorted(chain.from_iterable(each.row_lengths for each in measured)))
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
    num_lost_thoughts = sum(rows["lost_thoughts"])
    rows = rows.select(used).remove_columns(["problem", "lost_thoughts"])
    roles = [
        [message["role"] for message in json.loads(text)["messages"]]
        for text in conversations.select(used)["conversation"]
    ]
    lengths, num_trained = [], 0
    for row in rows:
        lengths.append(len(row["input_ids"]))
        num_trained += sum(row["loss_mask"])
    statistics = SetStatistics(
        name=place.label,
        num_records=len(records),
        num_conversations=len(rows),
        dropped=dict(dropped.most_common()),
        num_turns=sum(map(len, roles)),
        num_replies=sum(turns.count("assistant") for turns in roles),
        num_tokens=sum(lengths),
        num_trained_tokens=num_trained,
        num_at_max_length=lengths.count(data_args.max_length),
        lengths=_quantiles(sorted(lengths)),
        num_draws=len(rows),
        num_lost_thoughts=num_lost_thoughts,
    )
    return MeasuredSet(statistics, rows, lengths)


def _read(place: Place, data_args: DataArguments) -> datasets.Dataset:
    if data_args.streaming:
        records = iterate_place(place, data_args.record_format(), place.files)
        return datasets.Dataset.from_list([record() for record in islice(records, data_args.vocabulary_rows)])
    return datasets.concatenate_datasets(
        list(read_place(place, data_args.record_format(), max_samples=data_args.max_samples))
    )


def _without_place(problem: str) -> str:
    """Without the file and line that it names first, so that like problems are counted together."""
    place, _, reason = problem.partition(": ")
    return reason if "line " in place or "row " in place else problem


def _quantiles(lengths: list[int]) -> dict[str, int]:
    """Of sorted lengths; nothing of none."""
    last = len(lengths) - 1
    return {f"{share:g}": lengths[round(share * last)] for share in _QUANTILES} if lengths else {}
