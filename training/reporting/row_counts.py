"""Rows and tokens of a tokenized data set."""

from __future__ import annotations

import datasets
import pyarrow.compute


def row_lengths(rows: datasets.Dataset) -> list[int]:
    """Tokens of each row."""
    lengths: list[int] = []
    for batch in rows.with_format("arrow").iter(1000):
        lengths += batch["input_ids"].combine_chunks().value_lengths().to_pylist()
    return lengths


def count_rows(rows: datasets.Dataset) -> dict[str, int]:
    """The numbers that a report shows: rows, tokens, and tokens in the loss."""
    lengths = sorted(row_lengths(rows))
    learned = 0
    for batch in rows.with_format("arrow").iter(1000):
        learned += pyarrow.compute.sum(batch["loss_mask"].combine_chunks().flatten()).as_py() or 0
    return {
        "rows": len(lengths),
        "tokens": sum(lengths),
        "tokens in the loss": learned,
        "median row, tokens": lengths[len(lengths) // 2],
        "longest row, tokens": lengths[-1],
    }
