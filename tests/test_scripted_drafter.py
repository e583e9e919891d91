"""The drafter that other tests stand on: what it offers, and whose text a row has when rows move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.scripted_drafter import ScriptedDrafter, ScriptedState

VOCAB = 50


def texts(num_shared: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, VOCAB, (length,), generator=generator) for length in (12, 9, 15)]
    for row in rows:
        row[:num_shared] = rows[0][:num_shared]
    return rows


def hand_over(drafter: ScriptedDrafter, state: ScriptedState, rows: list[Tensor], counts: list[int]) -> Tensor:
    """Gives each row the next tokens of its text; returns the candidates after them [B, C]."""
    starts, width = state.lengths.tolist(), max(counts)
    tokens = torch.stack(
        [
            torch.nn.functional.pad(row[at + 1 : at + 1 + n], (0, width - n))
            for row, at, n in zip(rows, starts, counts, strict=True)
        ]
    )
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    features = torch.zeros(len(rows), width, 4)
    draft = drafter.extend(state, features, tokens, torch.tensor(counts), max_slots=max(ends))
    assert draft.token_ids is not None
    return draft.token_ids[:, 0]


def test_other_tokens_than_the_texts_are_refused_or_written_down() -> None:
    rows = texts()
    strict, lenient = ScriptedDrafter(rows, VOCAB), ScriptedDrafter(rows, VOCAB, is_strict=False)
    wrong = [rows[0], rows[1].flip(0), rows[2]]
    with pytest.raises(AssertionError, match="row 1 was given other tokens than its text at 1"):
        hand_over(strict, strict.start(3, 20, 8), wrong, [3, 3, 3])
    hand_over(lenient, lenient.start(3, 20, 8), wrong, [3, 3, 3])
    assert lenient.strangers == [(1, 1)]
    # What a row overshot its text by is nobody's.
    state = strict.start(3, 20, 8)
    hand_over(strict, state, [torch.cat([rows[0], rows[0]]), rows[1], rows[2]], [14, 2, 2])
