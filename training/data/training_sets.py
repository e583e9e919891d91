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
    fraction = 0.0 if data_args.eval_dataset else data_args.validation_fraction
    limit = data_args.max_eval_samples or None
    train_set: datasets.Dataset | ConversationStream
    eval_set: datasets.Dataset | None = None
    if data_args.streaming:
        train_set = stream = ConversationStream(
            data_args, tokenizer, seed=seed, holds_out=fraction > 0, rank=rank, num_processes=num_processes
        )
        eval_set = stream.held_out_rows(limit) if fraction > 0 else None
    else:
        paths, splits = data_args.dataset, data_args.splits
        train_set = rows = _load(data_args, tokenizer, paths, splits, data_args.max_samples, counts, "dataset")
        if fraction > 0 and len(rows) > 1:
            train_set, eval_set = rows.train_test_split(test_size=fraction, seed=seed).values()
    if paths := data_args.eval_dataset:
        splits = [data_args.eval_split] * len(paths)
        eval_set = _load(data_args, tokenizer, paths, splits, limit, counts, "eval_dataset")
    if eval_set is not None and limit is not None:
        eval_set = eval_set.take(min(limit, len(eval_set)))
    return train_set, eval_set


def load_every_row(data_args: DataArguments, tokenizer: Any) -> datasets.Dataset:
    """Returns every row that a run may read, however it draws, packs or holds out rows."""
    parts = load_datasets(replace(data_args, validation_fraction=0), tokenizer, seed=0)
    return datasets.concatenate_datasets([part for part in parts if part is not None])


def _load(
    data_args: DataArguments,
    tokenizer: Any,
    paths: Sequence[str],
    splits: Sequence[str],
    max_samples: int | None,
    counts: Counter[str] | None,
    option: str,
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
