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
    """Gives each row the next tokens of its text; returns the candidates behind them [B, C]."""
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
            assert is_true.nonzero().tolist() == [[rank, rank]], "only behind the true token, and at its rank"
        assert drafter.offered == {(0, rank), (1, rank)}
    missing = ScriptedDrafter(rows, VOCAB, ranks=(9,))
    candidates = hand_over(missing, missing.start(3, 20, 8), rows, [3, 5, 1])
    assert not (candidates == torch.stack([rows[0][4], rows[1][6], rows[2][2]])[:, None]).any()


def test_a_text_is_drafted_the_same_whatever_rows_stand_beside_it() -> None:
    """Rows leave the batch in the middle of a text, and others move up."""
    rows = texts()
    drafter = ScriptedDrafter(rows, VOCAB)
    state = drafter.start(3, 20, 8)
    hand_over(drafter, state, rows, [3, 5, 1])
    copied = drafter.start(2, 20, 8)
    drafter.copy_rows(copied, state, [2, 0], torch.tensor([1, 2]), max_slots=2)
    assert copied.rows.tolist() == [2, 0]
    both = hand_over(drafter, copied, [rows[2], rows[0]], [3, 2])
    last = drafter.start(1, 20, 8)
    drafter.copy_rows(last, copied, torch.tensor([1]), torch.tensor([4]), max_slots=4)
    assert last.rows.tolist() == [0]
    assert not last.is_prefix
    other = drafter.start(3, 20, 8)
    every = hand_over(drafter, other, rows, [4, 3, 4])
    assert torch.equal(both, every[[2, 0]])
    assert torch.equal(hand_over(drafter, last, [rows[0]], [1])[0], hand_over(drafter, other, rows, [1, 0, 0])[0])
    with pytest.raises(AssertionError, match="more slots are copied than there are"):
        drafter.copy_rows(last, copied, [1], torch.tensor([5]), max_slots=5)


def test_a_prefix_of_all_texts_is_read_once() -> None:
    rows = texts(num_shared=5)
    drafter = ScriptedDrafter(rows, VOCAB)
    prefix = drafter.start(1, 20, 8)
    for count in (2, 2):  # in chunks
        hand_over(drafter, prefix, rows[:1], [count])
    state = drafter.start(3, 20, 8)
    drafter.copy_rows(state, prefix, [0, 0, 0], torch.tensor([4, 4, 4]), max_slots=4)
    assert state.rows.tolist() == [0, 1, 2]
    candidates = hand_over(drafter, state, rows, [2, 1, 3])
    whole = drafter.start(3, 20, 8)
    assert torch.equal(candidates, hand_over(drafter, whole, rows, [6, 5, 7]))


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
