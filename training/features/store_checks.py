"""Checks before the first step: do stored features belong to this target and these texts?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.training.features.store import FeatureStore, TargetIdentity, name_tensors


def check_same_target(folder: Path, stored: TargetIdentity, found: TargetIdentity) -> None:
    """Raises ValueError, with the differences and the cure, when stored states are not this target's."""
    one, other = asdict(stored), asdict(found)
    if different := [f"{key} {one[key]} (now {other[key]})" for key in one if key != "name" and one[key] != other[key]]:
        raise ValueError(
            f"{folder} holds states of another target ({stored.name}) than this run's ({found.name}): they differ in "
            f"{', '.join(different)}. Give the target, --target_dtype and --init_heads of the extraction, or extract "
            "the states of this target into another folder (draftsmith features)"
        )


def iterate_ids(rows: datasets.Dataset) -> Iterator[Tensor]:
    """Yields the token ids [T] of each row."""
    for batch in rows.select_columns("input_ids").with_format("arrow").iter(1000):
        column = batch["input_ids"].combine_chunks()
        ids = torch.from_numpy(column.flatten().to_numpy().copy())
        yield from ids.split(column.value_lengths().to_pylist())


def check_complete(store: FeatureStore, heads: DraftHeads, rows: Mapping[str, Any]) -> None:
    """Raises ValueError when a run needs tensors, shards or texts that the store lacks.

    Args:
        rows: by purpose; the texts of a stream cannot be checked before they are read.
    """
    settings, kind = store.settings, heads.config.head_type
    wanted = name_tensors(heads.feature_layers, settings.target.num_layers)
    if lacking := [name for name in wanted if name not in settings.tensors]:
        raise ValueError(
            f"{store.folder} holds {', '.join(settings.tensors)}, and these {kind} heads read "
            f"{', '.join(wanted)}: extract again with --head_type {kind} to store {', '.join(lacking)}"
        )
    planned = settings.num_shards
    if store.num_finished < planned:
        raise ValueError(
            f"{store.folder} is not finished: it has {store.num_finished} of {planned} shards. Run the same "
            "draftsmith features command again to write the others"
        )
    for purpose, part in rows.items():
        known = iterate_ids(part) if isinstance(part, datasets.Dataset) else ()
        if missing := sum(not store.has(ids) for ids in known):
            raise ValueError(
                f"{store.folder} lacks {missing} of the {len(part)} {purpose} texts of this run: train with the data, "
                "the max_length and the chat template of the extraction (some write today's date), or extract again"
            )
