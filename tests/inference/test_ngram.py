"""The n-gram drafter against a search with Python lists."""

from __future__ import annotations

import math

import pytest
import torch

from inference.drafter import Drafter, DraftLogits
from inference.ngram import NgramDrafter


def look_up(text: list[int], path: list[int], max_ngram: int, num_candidates: int) -> list[tuple[int, float]]:
    """(token, score) of the distinct continuations: longest suffix first, then the latest occurrence."""
    suffix_of, found = text + path, list[tuple[int, float]]()
    for length in range(min(max_ngram, len(suffix_of)), 0, -1):
        suffix = suffix_of[-length:]
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == suffix and text[end] not in [token for token, _ in found]:
                found.append((text[end], float(length - len(found))))
    return found[:num_candidates]


def check(draft: DraftLogits, texts: list[list[int]], paths: list[list[list[int]]], drafter: NgramDrafter) -> int:
    """Compare all nodes [B][W] of a frontier; returns the number of candidates found."""
    assert draft.token_ids is not None
    assert draft.logits.shape == draft.token_ids.shape == (len(texts), len(paths[0]), drafter.num_candidates)
    total = 0
    for row, text in enumerate(texts):
        for node, path in enumerate(paths[row]):
            wanted = look_up(text, path, drafter.max_ngram, drafter.num_candidates)
            scores = draft.logits[row, node].tolist()
            assert draft.token_ids[row, node, : len(wanted)].tolist() == [token for token, _ in wanted]
            assert scores == [score for _, score in wanted] + [-math.inf] * (len(scores) - len(wanted))
            total += len(wanted)
    return total


def test_the_docstrings_example() -> None:
    text = [ord(letter) for letter in "abcabdxbeab"]
    drafter = NgramDrafter(max_ngram=2, num_candidates=3)
    assert isinstance(drafter, Drafter)
    state = drafter.start(1, 32, 0)
    draft = drafter.extend(state, None, torch.tensor([text]), torch.tensor([11]), max_slots=11)
    assert draft.token_ids is not None
    assert "".join(map(chr, draft.token_ids[0, 0].tolist())) == "dce"
    assert draft.logits.tolist() == [[[2.0, 1.0, -1.0]]]


@pytest.mark.parametrize(("max_ngram", "num_candidates"), [(1, 1), (2, 4), (3, 2), (5, 7)])
def test_random_texts_and_trees_equal_the_slow_search(max_ngram: int, num_candidates: int) -> None:
    """Ragged rows, several steps, trees of several levels, arrears, a row that waits; few letters, so much repeats."""
    generator = torch.Generator().manual_seed(0)
    drafter = NgramDrafter(max_ngram=max_ngram, num_candidates=num_candidates)
    state = drafter.start(3, 128, 64)
    texts: list[list[int]] = [[], [], []]
    total = 0
    for step in range(8):
        counts = torch.randint(1, 12, (3,), generator=generator)
        if step == 3:
            counts[1] = 0
        slots = torch.randint(0, 4, (3, int(counts.max()) + step % 2), generator=generator)
        for row, count in enumerate(counts.tolist()):
            texts[row] += slots[row, :count].tolist()
        draft = drafter.extend(state, None, slots, counts, max_slots=max(map(len, texts)))
        paths: list[list[list[int]]] = [[[]] for _ in texts]
        total += check(draft, texts, paths, drafter)
        for depth in range(1, 4):
            width = 2 + depth
            parents = torch.randint(0, len(paths[0]), (3, width), generator=generator)
            tokens = torch.randint(0, 4, (3, width), generator=generator)
            paths = [
                [[*paths[row][int(parents[row, node])], int(tokens[row, node])] for node in range(width)]
                for row in range(3)
            ]
            total += check(drafter.expand(state, tokens, parents, depth), texts, paths, drafter)
    assert total > 100


def test_a_text_without_repetition_has_no_candidates() -> None:
    drafter = NgramDrafter(num_candidates=2)
    draft = drafter.extend(drafter.start(1, 8, 0), None, torch.tensor([[3, 4, 5]]), torch.tensor([3]), max_slots=3)
    assert draft.logits.tolist() == [[[-math.inf, -math.inf]]]


def test_padding_at_the_end_of_the_buffer_does_no_harm() -> None:
    drafter = NgramDrafter(max_ngram=1, num_candidates=1)
    state = drafter.start(1, 4, 0)
    drafter.extend(state, None, torch.tensor([[1, 2, 1]]), torch.tensor([3]), max_slots=3)
    draft = drafter.extend(state, None, torch.tensor([[2, 9, 9, 9]]), torch.tensor([1]), max_slots=4)
    assert state.history[0, :4].tolist() == [1, 2, 1, 2]
    assert draft.token_ids is not None
    assert draft.token_ids.tolist() == [[[1]]]


@pytest.mark.parametrize("options", [{"max_ngram": 0}, {"num_candidates": 0}])
def test_refusals(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_ngram and num_candidates start at 1"):
        NgramDrafter(**options)
