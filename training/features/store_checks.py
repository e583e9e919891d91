"""Checks before the first step: are stored features those of this target and these texts, and is there room?"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor

from heads import DraftHeads
from training.features.store import FeatureStore, StoreSettings, TargetIdentity, name_tensors


@dataclass(frozen=True)
class RowsOfRun:
    """The texts of a run; `dataset`, `max_length` and `tokenizer_hash` say in messages where they come from."""

    train_set: Any
    eval_set: Any | None
    dataset: Sequence[str]
    max_length: int
    tokenizer_hash: str

    def known(self) -> dict[str, datasets.Dataset]:
        """The rows that can be checked before the first step, by purpose: a stream's cannot."""
        parts = {"training": self.train_set, "held-out": self.eval_set}
        return {purpose: part for purpose, part in parts.items() if isinstance(part, datasets.Dataset)}


def check_same_target(folder: Path, stored: TargetIdentity, found: TargetIdentity) -> None:
    """Raises ValueError, with the differences and the cure, when stored states are not this target's."""
    one, other = asdict(stored), asdict(found)
    if different := [f"{key} {one[key]} (now {other[key]})" for key in one if key != "name" and one[key] != other[key]]:
        raise ValueError(
            f"{folder} holds states of another target ({stored.name}) than this run's ({found.name}): they differ in "
            f"{', '.join(different)}. Give the target, --target_dtype and --init_heads of the extraction, or extract "
            "the states of this target into another folder (scripts/extract_features.py)"
        )


def check_room(folder: Path, size: int) -> None:
    """Raises ValueError when `size` bytes are more than what is free on the folder's disk."""
    if size > (free := free_space(folder)):
        raise ValueError(
            f"features would take {size / 1e9:.3g} GB more in {folder}, and {free / 1e9:.3g} GB are free there: choose "
            "another disk or fewer texts (--max_samples), or train online, which stores nothing"
        )


def free_space(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def iterate_ids(rows: datasets.Dataset) -> Iterator[Tensor]:
    """Yields the token ids [T] of each row."""
    for batch in rows.select_columns("input_ids").with_format("arrow").iter(1000):
        column = batch["input_ids"].combine_chunks()
        ids = torch.from_numpy(column.flatten().to_numpy().copy())
        yield from ids.split(column.value_lengths().to_pylist())


def check_can_fill(store: FeatureStore, wanted: StoreSettings) -> None:
    """Raises ValueError when a hybrid run would add other tensors than those in the store."""
    stored = store.settings
    if (stored.tensors, stored.dtype) != (wanted.tensors, wanted.dtype):
        raise ValueError(
            f"{store.folder} holds {', '.join(stored.tensors)} in {stored.dtype}, and this run would add "
            f"{', '.join(wanted.tensors)} in {wanted.dtype}: fill another folder, or train with --feature_mode offline"
        )


def check_complete(store: FeatureStore, heads: DraftHeads, rows: RowsOfRun) -> None:
    """Raises ValueError when an offline run needs tensors, shards or texts that the store lacks."""
    settings, kind = store.settings, heads.config.head_type
    wanted = name_tensors(heads.feature_layers, settings.target.num_layers)
    if lacking := [name for name in wanted if name not in settings.tensors]:
        raise ValueError(
            f"{store.folder} holds {', '.join(settings.tensors)}, and these {kind} heads read "
            f"{', '.join(wanted)}: extract again with --head_type {kind} to store {', '.join(lacking)}"
        )
    planned = settings.num_shards
    if planned is not None and store.num_finished < planned:
        raise ValueError(
            f"{store.folder} is not finished: it has {store.num_finished} of {planned} shards. Run the same "
            "extract_features.py command again to write the others"
        )
    for purpose, part in rows.known().items():
        if missing := sum(not store.has(ids) for ids in iterate_ids(part)):
            raise ValueError(
                f"{store.folder} lacks {missing} of the {len(part)} {purpose} texts of this run "
                f"({_explain_missing(settings, rows)}): train with the options of the extraction, extract again, or "
                "add them with --feature_mode hybrid"
            )


def _explain_missing(stored: StoreSettings, rows: RowsOfRun) -> str:
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
    return "; ".join(differences) or "the options are those of the extraction, so the data has changed"
