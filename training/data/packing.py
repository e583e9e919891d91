"""Packs several conversations into each row of up to `max_length` tokens.

This file decides which conversations share a row; `draftsmith.heads.modules.documents` keeps them from seeing one
another.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import datasets

from draftsmith.training.data.chat_tokens import ROW

WINDOW = 1000  # conversations, in random order, that are packed together

_PACKED = datasets.Features({**ROW, "document_lengths": datasets.Sequence(datasets.Value("int32"))})


def pack_rows(rows: datasets.Dataset, max_length: int, *, seed: int) -> datasets.Dataset:
    """Returns rows `input_ids`, `loss_mask` and `document_lengths`, the lengths of the conversations in a row.

    Which conversations share a row depends on `seed`. None is cut or left out.
    """
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
    """Packs one window's columns `input_ids` and `loss_mask`; adds `document_lengths`."""
    lengths = [len(ids) for ids in window["input_ids"]]
    packs = fit_best(lengths, max_length)
    packed: dict[str, list[Any]] = {"document_lengths": [[lengths[index] for index in pack] for pack in packs]}
    for name in ("input_ids", "loss_mask"):
        packed[name] = [[value for index in pack for value in window[name][index]] for pack in packs]
    return packed


def fit_best(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Best fit decreasing: returns the indices of the conversations in each row, rows ordered by their first index.

    The conversations are placed longest first, each into the fullest row with room for it. One longer than `max_length`
    gets its own row.

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
