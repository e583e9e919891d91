"""Where a run's features come from: the options, and what must agree before the first step."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
from torch import Tensor
from transformers import TrainerCallback

from heads import DraftHeads
from inference.targets.target import Target
from training.features.sharded_target import is_sharded
from training.features.sources import (
    FeatureSource,
    FlushFeatures,
    HybridFeatures,
    OnlineFeatures,
    StoredFeatures,
    tensor_name,
)
from training.features.store import (
    FeatureStore,
    StoreSettings,
    TargetIdentity,
    write_settings,
)
from training.losses.terms import parse_loss

logger = logging.getLogger(__name__)

Collate = Callable[[Any], dict[str, Tensor]]


@dataclass
class FeatureArguments:
    """Where the target's states come from."""

    features: str | None = field(
        default=None,
        metadata={
            "help": "Folder of stored features (scripts/extract_features.py); none = the target runs on every batch."
        },
    )
    feature_mode: Literal["offline", "hybrid"] = field(
        default="offline",
        metadata={
            "help": "offline: every text must be in --features, and the target's layers run in checks and evaluations "
            "only. hybrid: what is missing there is computed and stored, so that the first epoch fills the folder."
        },
    )
    feature_shard_mb: float = field(
        default=256,
        metadata={"help": "hybrid: states kept in memory, in megabytes, until they are written as a shard."},
    )
    max_disk_gb: float | None = field(
        default=None,
        metadata={"help": "Gigabytes that features may take; none = what is free on that disk when they are begun."},
    )

    def __post_init__(self) -> None:
        if self.features is None and self.feature_mode != "offline":
            raise ValueError(f"got feature_mode {self.feature_mode!r} without features: name the folder to fill")
        for name in ("feature_shard_mb", "max_disk_gb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"got {name} {value}: it must be above 0")
            if self.feature_mode != "hybrid" and value != getattr(FeatureArguments, name):
                raise ValueError(
                    f"got {name} {value} without feature_mode hybrid, which alone writes features in training: leave "
                    "it out, or give --feature_mode hybrid"
                )


@dataclass(frozen=True)
class PreparedFeatures:
    """What the trainer takes: where states come from, the collator that reads ahead, and what to do between epochs.

    A source of None is the trainer's own, online. peek is the source without its traces on disk, for the self-check;
    dtype is the narrowest that states pass through; bytes_to_store is what the run will add to the folder.
    """

    source: FeatureSource | None
    peek: FeatureSource
    dtype: torch.dtype
    collate: Collate
    callbacks: list[TrainerCallback]
    bytes_to_store: int = 0


@dataclass(frozen=True)
class RowsOfRun:
    """The texts of a run; the options and the tokenizer that they come from, for messages."""

    train_set: Any
    eval_set: Any | None
    dataset: Sequence[str]
    max_length: int
    tokenizer_hash: str

    def known(self) -> dict[str, datasets.Dataset]:
        """Those that can be looked through before the first step, by what they are for: not what is streamed."""
        parts = {"training": self.train_set, "held-out": self.eval_set}
        return {what: part for what, part in parts.items() if isinstance(part, datasets.Dataset)}


def prepare_features(
    args: FeatureArguments,
    *,
    target: Target,
    heads: DraftHeads,
    rows: RowsOfRun,
    loss_type: str,
    collate: Collate,
    identify: Callable[[], TargetIdentity],
    rank: int = 0,
    writes: bool = True,
) -> PreparedFeatures:
    """Online features, or those of `args.features` after everything that can be known now has been checked.

    Args:
        identify: tells which target this is; called only if something is stored.
        writes: False: a hybrid run leaves the folder as it is.

    Raises:
        ValueError: features of another target, of other layers or of other texts, or no room for them.
    """
    online = OnlineFeatures(target, heads.feature_layers)
    if args.features is None:
        return PreparedFeatures(None, online, target.dtype, collate, [])
    folder = Path(args.features)
    wanted = StoreSettings(
        target=identify(),
        tensors={**name_tensors(heads.feature_layers, target.num_layers), "last": "post-norm"},
        dtype=str(target.dtype).removeprefix("torch."),
        teacher_top_k=None,
        dataset=list(rows.dataset),
        max_length=rows.max_length,
        tokenizer_hash=rows.tokenizer_hash,
    )
    if args.feature_mode == "hybrid" and is_sharded(target.model):
        raise ValueError(
            "got feature_mode hybrid with a target whose weights processes share: all must run it together, and here "
            "each runs it for what it lacks. Extract the features first, or train online"
        )
    is_new = args.feature_mode == "hybrid" and not (folder / "index.json").exists()
    if is_new and writes:
        write_settings(folder, wanted)
    store = FeatureStore(folder, wanted if is_new and not writes else None)
    check_same_target(folder, store.settings.target, wanted.target)
    if args.feature_mode == "hybrid":
        _check_same_tensors(folder, store.settings, wanted)
        size = _size_of_missing(store, rows)
        check_room(folder, size, args.max_disk_gb)
        shard_bytes = int(args.feature_shard_mb * 10**6)
        hybrid = HybridFeatures(online, store, rank=rank, shard_bytes=shard_bytes, writes=writes)
        callbacks: list[TrainerCallback] = [FlushFeatures(hybrid)]
        return PreparedFeatures(hybrid, hybrid.peek, target.dtype, hybrid.collator(collate), callbacks, size)
    _check_layers(store, heads, loss_type)
    _check_finished(store)
    _check_rows(store, rows)
    stored = StoredFeatures(target, heads.feature_layers, store)
    narrow: torch.dtype = min(target.dtype, getattr(torch, store.settings.dtype), key=lambda dtype: dtype.itemsize)
    return PreparedFeatures(stored, stored, narrow, stored.collator(collate), [])


def name_tensors(layers: Sequence[int], num_layers: int) -> dict[str, str]:
    """The tensors of tapped layers, and whether they are states before or behind a norm."""
    names = sorted({tensor_name(layer, num_layers) for layer in layers})
    return {name: "post-norm" if name == "last" else "pre-norm" for name in names}


def check_same_target(folder: Path, stored: TargetIdentity, found: TargetIdentity) -> None:
    """Raises ValueError, with what differs and what to do, when stored states are not this target's."""
    if stored.dtype != found.dtype:
        raise ValueError(
            f"{folder} holds states of {stored.name} in {stored.dtype}, this run's target is in {found.dtype}: give "
            f"--target_dtype {stored.dtype}, or extract again"
        )
    if different := [
        key
        for key in ("hidden_size", "num_layers", "vocab_size", "config_hash", "weights_hash")
        if getattr(stored, key) != getattr(found, key)
    ]:
        raise ValueError(
            f"{folder} holds states of another target ({stored.name}) than this run's ({found.name}): they differ in "
            f"{', '.join(different)}. Train for the target they were extracted from, or extract those of this one "
            "(scripts/extract_features.py)"
        )
    if stored.adapter_hash != found.adapter_hash:
        kinds = [
            f"with the adapter {each.adapter_hash}" if each.adapter_hash else "without an adapter"
            for each in (stored, found)
        ]
        raise ValueError(
            f"{folder} holds states of {stored.name} {kinds[0]}, this run's target is the one {kinds[1]}, which gives "
            "other states (heads trained with lora_r bring their adapter along): extract those of these heads, with "
            "the same --init_heads as in training, into another folder"
        )


def check_room(folder: Path, size: int, max_disk_gb: float | None) -> None:
    """Raises ValueError when `size` bytes are more than may be written."""
    limit = free_space(folder) if max_disk_gb is None else max_disk_gb * 1e9
    if size > limit:
        raise ValueError(
            f"features would take {size / 1e9:.3g} GB more in {folder}, and {limit / 1e9:.3g} GB "
            + ("are free there" if max_disk_gb is None else "are allowed by --max_disk_gb")
            + ": choose another disk, fewer texts (--max_samples), fewer layers, a narrower --features_dtype, "
            "or --teacher_top_k 64 --store_last_hidden false; --max_disk_gb says what may be written where free space "
            "is not what counts; or train online, which stores nothing"
        )


def free_space(folder: Path) -> int:
    """Bytes that are free where the folder is, or will be."""
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def count_missing(store: FeatureStore, rows: datasets.Dataset) -> tuple[int, int, int]:
    """Of rows of conversations: how many are not stored, their tokens, and how many rows there are."""
    missing = tokens = total = 0
    for input_ids in iterate_ids(rows):
        total += 1
        if not store.has(input_ids):
            missing += 1
            tokens += len(input_ids)
    return missing, tokens, total


def iterate_ids(rows: datasets.Dataset) -> Iterator[Tensor]:
    """The token ids [T] of each row."""
    for batch in rows.select_columns("input_ids").with_format("arrow").iter(1000):
        column = batch["input_ids"].combine_chunks()
        ids = torch.from_numpy(column.flatten().to_numpy().copy())
        yield from ids.split(column.value_lengths().to_pylist())


def _size_of_missing(store: FeatureStore, rows: RowsOfRun) -> int:
    size = 0
    for part in rows.known().values():
        missing, tokens, _ = count_missing(store, part)
        size += store.settings.size_of(missing, tokens)
    logger.info("features that are not stored yet will take about %.3g GB in %s", size / 1e9, store.folder)
    return size


def _check_layers(store: FeatureStore, heads: DraftHeads, loss_type: str) -> None:
    settings, kind = store.settings, heads.config.head_type
    wanted = name_tensors(heads.feature_layers, settings.target.num_layers)
    if lacking := sorted(wanted.keys() - settings.tensors.keys()):
        raise ValueError(
            f"{store.folder} holds {', '.join(settings.tensors)}, and these {kind} heads read {', '.join(wanted)}: "
            f"extract again with --head_type {kind} (or --feature_layers) to store {', '.join(lacking)}"
        )
    if "last" not in settings.tensors and "states" in parse_loss(loss_type).reads:
        raise ValueError(
            f"{store.folder} was stored without the last state (--store_last_hidden false), which the loss {loss_type} "
            f"compares those of {kind} heads with: extract again with it, or choose another --loss_type"
        )


def _check_same_tensors(folder: Path, stored: StoreSettings, wanted: StoreSettings) -> None:
    if (stored.tensors, stored.dtype) != (wanted.tensors, wanted.dtype):
        raise ValueError(
            f"{folder} holds {', '.join(stored.tensors)} in {stored.dtype}; what is missing would be added as "
            f"{', '.join(wanted.tensors)} in {wanted.dtype}: fill another folder, or train with --feature_mode offline"
        )


def _check_finished(store: FeatureStore) -> None:
    planned = store.settings.num_shards
    if planned is not None and store.num_finished < planned:
        raise ValueError(
            f"{store.folder} is not finished: {store.num_finished} of {planned} shards are there. Run the same "
            "extract_features.py command again, which writes the others"
        )


def _check_rows(store: FeatureStore, rows: RowsOfRun) -> None:
    for what, part in rows.known().items():
        missing, _, total = count_missing(store, part)
        if not missing:
            continue
        stored = store.settings
        differences = [
            f"{name} was {before}, now {now}"
            for name, before, now in (
                ("max_length", stored.max_length, rows.max_length),
                ("dataset", ", ".join(stored.dataset), ", ".join(rows.dataset)),
            )
            if before != now
        ]
        if stored.tokenizer_hash != rows.tokenizer_hash:
            differences.append("the tokenizer or its chat template has changed")
        raise ValueError(
            f"{store.folder} lacks {missing} of the {total} {what} texts of this run "
            f"({'; '.join(differences) or 'extracted with the same options, so the data has changed'}): train with the "
            "options they were extracted with, extract again, or add them with --feature_mode hybrid"
        )
