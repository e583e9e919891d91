"""The rows that a run learns from and those that it holds out: every set that its options name, mixed as they say."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import datasets

from inference.targets.model_config import LengthLimit
from training.data.chat_tokens import tokenize_conversations
from training.data.conversations import load_conversations
from training.data.options import DataArguments
from training.data.streaming import ConversationStream

logger = logging.getLogger(__name__)


def cut_to_limit(data_args: DataArguments, limit: LengthLimit, *, has_warning: bool = True) -> DataArguments:
    """Rows no longer than a target's position limit."""
    if limit.max_length is None or data_args.max_length <= limit.max_length:
        return data_args
    if has_warning:
        logger.warning(
            "max_length is %d, the target takes %d tokens (%s): longer conversations are cut there",
            data_args.max_length,
            limit.max_length,
            limit.reason,
        )
    return replace(data_args, max_length=limit.max_length)


def load_datasets(
    data_args: DataArguments, tokenizer: Any, *, seed: int, rank: int = 0, num_processes: int = 1
) -> tuple[datasets.Dataset | ConversationStream, datasets.Dataset | None]:
    """Tokenized training and held-out conversations; the latter None when there is nothing to hold out.

    Without weights, the sets stand one behind the other. With weights, conversations are held out of each set before
    they are mixed, so that none that repeats in the mixture is in both.

    Args:
        rank: this process, of `num_processes`: each has a part of a stream; of others they share all rows.
    """
    if data_args.streaming:
        return _stream(data_args, tokenizer, seed, rank, num_processes)
    if data_args.dataset_weights:
        sets = [
            _load(data_args, tokenizer, [name], split, data_args.max_samples)
            for name, split in zip(data_args.dataset, data_args.splits, strict=True)
        ]
        parts = [_hold_out(rows, data_args, seed=seed) for rows in sets]
        held_out = [rows for _, rows in parts if rows is not None]
        if held_out and len(held_out) < len(parts):
            small = [name for name, (_, rows) in zip(data_args.dataset, parts, strict=True) if rows is None]
            logger.warning(
                "nothing is held out: a mixture is held out of each of its sets, and %s has a single conversation; "
                "give --eval_dataset to evaluate",
                ", ".join(small),
            )
            parts, held_out = [(rows, None) for rows in sets], []
        train_set = mix([train for train, _ in parts], data_args, seed=seed)
        eval_set = mix(held_out, data_args, seed=seed) if held_out else None
        if data_args.max_samples is not None:
            train_set = train_set.select(range(min(data_args.max_samples, len(train_set))))
    else:
        rows = _load_all(data_args, tokenizer)
        train_set, eval_set = _hold_out(rows, data_args, seed=seed)
    if data_args.eval_dataset:
        limit = data_args.max_eval_samples or None
        return train_set, _load(data_args, tokenizer, data_args.eval_dataset, data_args.eval_split, limit)
    if eval_set is not None and data_args.max_eval_samples:
        eval_set = eval_set.select(range(min(data_args.max_eval_samples, len(eval_set))))
    return train_set, eval_set


def _stream(
    data_args: DataArguments, tokenizer: Any, seed: int, rank: int, num_processes: int
) -> tuple[ConversationStream, datasets.Dataset | None]:
    """The training rows as a stream. Those held out are few: they are read first, and stored."""
    limit = data_args.max_eval_samples or None
    holds_out = not data_args.eval_dataset and data_args.validation_fraction > 0
    stream = ConversationStream(
        data_args, tokenizer, seed=seed, holds_out=holds_out, rank=rank, num_processes=num_processes
    )
    if data_args.eval_dataset:
        return stream, _load(data_args, tokenizer, data_args.eval_dataset, data_args.eval_split, limit)
    return stream, stream.held_out_rows(limit) if holds_out else None


def mix(parts: Sequence[datasets.Dataset], data_args: DataArguments, *, seed: int) -> datasets.Dataset:
    """One epoch of a weighted mixture: rows of each part in random order, the same for the same seed."""
    settings = _mixture(data_args, seed)
    counts = count_draws([len(part) for part in parts], data_args, seed=seed)
    for name, part, share, draws in zip(data_args.dataset, parts, settings["probabilities"], counts, strict=True):
        logger.info("%s: %d draws (share %.3f) of %d conversations", name, draws, share, len(part))
    return datasets.interleave_datasets([part.shuffle(seed=seed) for part in parts], **settings)


def count_learned(sizes: Sequence[int], data_args: DataArguments) -> list[int]:
    """How many conversations of sets of these sizes are left in a mixture when some are held out of each."""
    if data_args.eval_dataset or data_args.validation_fraction == 0 or min(sizes) < 2:
        return list(sizes)
    return [size - math.ceil(size * data_args.validation_fraction) for size in sizes]


def count_draws(sizes: Sequence[int], data_args: DataArguments, *, seed: int) -> list[int]:
    """How many conversations `mix` takes of parts of these sizes: the same draws, of rows that say where they come
    from."""
    origins = [datasets.Dataset.from_dict({"part": [index] * size}) for index, size in enumerate(sizes)]
    counts = Counter(datasets.interleave_datasets(origins, **_mixture(data_args, seed))["part"][:])
    return [counts[index] for index in range(len(sizes))]


def _mixture(data_args: DataArguments, seed: int) -> dict[str, Any]:
    total = sum(data_args.dataset_weights)
    shares = [weight / total for weight in data_args.dataset_weights]
    return {"probabilities": shares, "seed": seed, "stopping_strategy": data_args.stopping_strategy}


def _load_all(data_args: DataArguments, tokenizer: Any) -> datasets.Dataset:
    """All of `dataset` in order, up to `max_samples`."""
    if len(data_args.dataset_split) == 1:
        return _load(data_args, tokenizer, data_args.dataset, data_args.dataset_split[0], data_args.max_samples)
    parts = [
        _load(data_args, tokenizer, [name], split, data_args.max_samples)
        for name, split in zip(data_args.dataset, data_args.splits, strict=True)
    ]
    rows = datasets.concatenate_datasets(parts)
    return rows if data_args.max_samples is None else rows.select(range(min(data_args.max_samples, len(rows))))


def _load(
    data_args: DataArguments, tokenizer: Any, paths: Sequence[str], split: str, max_samples: int | None
) -> datasets.Dataset:
    conversations = load_conversations(
        paths,
        split=split,
        max_samples=max_samples,
        skip_bad_lines=data_args.skip_bad_lines,
        record_format=data_args.record_format(),
    )
    return tokenize_conversations(
        conversations,
        tokenizer,
        max_length=data_args.max_length,
        num_proc=data_args.num_proc,
        train_on_thinking=data_args.train_on_thinking,
    )


def _hold_out(
    rows: datasets.Dataset, data_args: DataArguments, *, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    if data_args.eval_dataset or data_args.validation_fraction == 0 or len(rows) < 2:
        return rows, None
    parts = rows.train_test_split(test_size=data_args.validation_fraction, seed=seed)
    return parts["train"], parts["test"]
