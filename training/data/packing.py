"""Packing: rows of about `max_length` tokens, each of several conversations that do not see one another.

What keeps them apart is `inference.targets.documents`; here it is decided which of them share a row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import datasets

WINDOW = 1000  # conversations, in random order, that are packed among themselves

_PACKED = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "loss_mask": datasets.Sequence(datasets.Value("int8")),
        "document_lengths": datasets.Sequence(datasets.Value("int32")),
    }
)


def pack_rows(rows: datasets.Dataset, max_length: int, *, seed: int) -> datasets.Dataset:
    """Rows `input_ids` and `loss_mask` of up to `max_length` tokens, and the `document_lengths` of the conversations in
    them. Which ones share a row is drawn by `seed`, the same at each call; none is cut or left out."""
    return rows.shuffle(seed=seed).map(
        pack_window,
        batched=True,
        batch_size=WINDOW,
        fn_kwargs={"max_length": max_length},
        features=_PACKED,
        remove_columns=rows.column_names,
        desc="Packing conversations",
    )


def pack_window(window: dict[str, list[list[int]]], max_length: int) -> dict[str, list[Any]]:
    """Packs columns `input_ids` and `loss_mask` among themselves; returns them and `document_lengths`."""
    lengths = [len(ids) for ids in window["input_ids"]]
    packs = fit_best(lengths, max_length)
    packed: dict[str, list[Any]] = {"document_lengths": [[lengths[index] for index in pack] for pack in packs]}
    for name in ("input_ids", "loss_mask"):
        packed[name] = [[value for index in pack for value in window[name][index]] for pack in packs]
    return packed


def fit_best(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Best fit decreasing: which conversations share a row, by index; rows in the order of their first ones.

    The longest first, each goes into the fullest row that still has room for it. One longer than `max_length` has a row
    of its own.

    >>> fit_best([40, 100, 60, 30], 100)
    [[0, 2], [1], [3]]
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(rooms, (lengths[index], 0))
        if place < len(rooms):
            free, row = rooms.pop(place)
        else:
            free, row = max_length, len(packs)
            packs.append([])
        packs[row].append(index)
        insort(rooms, (free - lengths[index], row))
    return sorted(map(sorted, packs))
