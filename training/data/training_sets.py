"""Loads the training rows and the held-out rows of a run: of all its sets."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import datasets

from draftsmith.inference.targets.model_config import LengthLimit
from draftsmith.training.data.chat_tokens import drop_unusable, tokenize_conversations
from draftsmith.training.data.conversations import load_conversations
from draftsmith.training.data.options import DataArguments
from draftsmith.training.data.streaming import ConversationStream

logger = logging.getLogger(__name__)


def cut_to_limit(data_args: DataArguments, limit: LengthLimit, *, has_warning: bool = True) -> DataArguments:
    """Lowers `max_length` to a target's position limit."""
    if limit.max_length is None or data_args.max_length <= limit.max_length:
        return data_args
    if has_warning:
        logger.warning(
            "max_length is %d, and the target takes only %d tokens (%s): longer conversations are cut there",
            data_args.max_length,
            limit.max_length,
            limit.reason,
        )
    return replace(data_args, max_length=limit.max_length)


def load_datasets(
    data_args: DataArguments,
    tokenizer: Any,
    *,
    seed: int,
    rank: int = 0,
    num_processes: int = 1,
    counts: Counter[str] | None = None,
) -> tuple[datasets.Dataset | ConversationStream, datasets.Dataset | None]:
    """Returns tokenized training rows and held-out rows; the latter None when nothing is held out.

    Args:
        rank: this process, of `num_processes`; each reads its part of a stream. All share the rows of stored sets.
        counts: of stored sets: dropped conversations by reason, and turns that are not learned, are added.
    """
    limit = data_args.max_eval_samples or None
    if data_args.streaming:
        holds_out = not data_args.eval_dataset and data_args.validation_fraction > 0
        train_set: datasets.Dataset | ConversationStream
        train_set = stream = ConversationStream(
            data_args, tokenizer, seed=seed, holds_out=holds_out, rank=rank, num_processes=num_processes
        )
        eval_set = stream.held_out_rows(limit) if holds_out else None
    else:
        train_set, eval_set = _hold_out(_load_sets(data_args, tokenizer, counts), data_args, seed=seed)
    if data_args.eval_dataset:
        eval_set = _load_held_out(data_args, tokenizer, counts)
    return train_set, None if eval_set is None else _first(eval_set, limit)


def load_every_row(data_args: DataArguments, tokenizer: Any) -> datasets.Dataset:
    """Returns every row that a run may read, however it draws, packs or holds out rows."""
    parts = [_load_sets(data_args, tokenizer)]
    if data_args.eval_dataset:
        parts.append(_load_held_out(data_args, tokenizer))
    return datasets.concatenate_datasets(parts)


def _load_sets(data_args: DataArguments, tokenizer: Any, counts: Counter[str] | None = None) -> datasets.Dataset:
    """All sets in order as one, up to `max_samples`."""
    return _load(data_args, tokenizer, data_args.dataset, data_args.splits, data_args.max_samples, counts)


def _load_held_out(data_args: DataArguments, tokenizer: Any, counts: Counter[str] | None = None) -> datasets.Dataset:
    splits = [data_args.eval_split] * len(data_args.eval_dataset)
    limit = data_args.max_eval_samples or None
    return _load(data_args, tokenizer, data_args.eval_dataset, splits, limit, counts, option="eval_dataset")


def _load(
    data_args: DataArguments,
    tokenizer: Any,
    paths: Sequence[str],
    splits: Sequence[str],
    max_samples: int | None,
    counts: Counter[str] | None,
    option: str = "dataset",
) -> datasets.Dataset:
    conversations = load_conversations(
        paths,
        splits=splits,
        max_samples=max_samples,
        skip_bad_lines=data_args.skip_bad_lines,
        record_format=data_args.record_format(),
        option=option,
    )
    rows = tokenize_conversations(
        conversations,
        tokenizer,
        max_length=data_args.max_length,
        num_proc=data_args.num_proc,
        skip_bad_lines=data_args.skip_bad_lines,
    )
    return drop_unusable(rows, counts)


def _hold_out(
    rows: datasets.Dataset, data_args: DataArguments, *, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    if data_args.eval_dataset or data_args.validation_fraction == 0 or len(rows) < 2:
        return rows, None
    parts = rows.train_test_split(test_size=data_args.validation_fraction, seed=seed)
    return parts["train"], parts["test"]


def _first(rows: datasets.Dataset, count: int | None) -> datasets.Dataset:
    return rows if count is None else rows.select(range(min(count, len(rows))))
