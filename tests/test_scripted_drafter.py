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


def test_the_true_token_stands_at_the_scheduled_rank_among_distinct_ones() -> None:
    rows = texts()
    for rank in range(4):
        drafter = ScriptedDrafter(rows, VOCAB, ranks=(rank,))
        state = drafter.start(3, 20, 8)
        candidates = hand_over(drafter, state, rows, [3, 5, 1])
        assert candidates[:, rank].tolist() == [int(row[at + 1]) for row, at in zip(rows, (3, 5, 1), strict=True)]
        assert all(len(set(row)) == 4 for row in candidates.tolist())
        deeper = drafter.expand(state, candidates, torch.zeros_like(candidates), 1).token_ids
        assert deeper is not None
        for row, at in enumerate((3, 5, 1)):
            is_true = deeper[row] == rows[row][at + 2]
            assert is_true.nonzero().tolist() == [[rank, rank]], "only after the true token, and at its rank"
        assert drafter.offered == {(0, rank), (1, rank)}
    missing = ScriptedDrafter(rows, VOCAB, ranks=(9,))
    candidates = hand_over(missing, missing.start(3, 20, 8), rows, [3, 5, 1])
    assert not (candidates == torch.stack([rows[0][4], rows[1][6], rows[2][2]])[:, None]).any()


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
