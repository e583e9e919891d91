"""The n-gram drafter against a search with Python lists."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.inference import DraftLogits, DraftSampling, DynamicTree
from draftsmith.inference.drafters.ngram import BACKOFF, NgramDrafter


def look_up(
    text: list[int], path: list[int], max_ngram: int, num_candidates: int
) -> tuple[list[int], list[float], float]:
    """The distinct continuations, longest suffix first, then the latest occurrence; their scores; the confidence."""
    suffix_of, found = text + path, dict[int, int]()  # token -> length of the suffix it follows
    ends: dict[int, list[int]] = {}  # where each suffix of this length occurred
    for length in range(min(max_ngram, len(suffix_of)), 0, -1):
        suffix = suffix_of[-length:]
        ends[length] = [end for end in range(length, len(text)) if text[end - length : end] == suffix]
        for end in reversed(ends[length]):
            found.setdefault(text[end], length)
    tokens = list(found)[:num_candidates]
    scores = []
    for token in tokens:
        weights = {end: 1 + end / len(text) for end in ends[found[token]]}
        share = sum(weight for end, weight in weights.items() if text[end] == token) / sum(weights.values())
        scores.append(math.log(share * BACKOFF ** (found[tokens[0]] - found[token])))
    return tokens, scores


def check(draft: DraftLogits, texts: list[list[int]], paths: list[list[list[int]]], drafter: NgramDrafter) -> int:
    """Compare all nodes [B][W] of a frontier; returns the number of candidates found."""
    assert draft.logits.shape == draft.token_ids.shape == (len(texts), len(paths[0]), drafter.num_candidates)
    total = 0
    for row, text in enumerate(texts):
        for node, path in enumerate(paths[row]):
            tokens, wanted = look_up(text, path, drafter.max_ngram, drafter.num_candidates)
            scores = draft.logits[row, node].tolist()
            assert draft.token_ids[row, node, : len(wanted)].tolist() == tokens
            assert scores == pytest.approx([*wanted, *[-math.inf] * (len(scores) - len(wanted))], abs=1e-5)
            total += len(wanted)
    return total


def test_the_docstrings_example() -> None:
    text = [ord(letter) for letter in "abcabdxbeab"]
    drafter = NgramDrafter(max_ngram=2, num_candidates=3)
    state = drafter.start(1, 32, 0)
    draft = drafter.extend(state, None, torch.tensor([text]), torch.tensor([11]), max_slots=11)
    assert "".join(map(chr, draft.token_ids[0, 0].tolist())) == "dce"
    wanted = [math.log(16 / 29), math.log(13 / 29), math.log(0.4 * 19 / 48)]
    assert draft.logits[0, 0].tolist() == pytest.approx(wanted, abs=1e-6)


def test_a_dynamic_tree_is_the_trie_of_what_followed() -> None:
    """Two continuations of two tokens that begin alike, and one that does not: prefixes are shared, each node once."""
    text = [5, 6, 1, 2, 5, 6, 1, 3, 5, 6, 4, 9, 5, 6]
    drafter = NgramDrafter(max_ngram=3, num_candidates=3)
    state = drafter.start(1, 32, 8)
    draft = drafter.extend(state, None, torch.tensor([text]), torch.tensor([len(text)]), max_slots=len(text))
    tree = DynamicTree(2, 3, 6).grow(drafter, state, torch.tensor([6]), draft, DraftSampling())
    paths = set()
    for node in range(1, tree.num_nodes):
        path, here = [], node
        while here > 0:
            path.append(int(tree.token_ids[0, here]))
            here = int(tree.parents[0, here])
        paths.add(tuple(reversed(path)))
    assert paths == {(1,), (4,), (1, 2), (1, 3), (4, 9)}


@pytest.mark.parametrize(("max_ngram", "num_candidates"), [(1, 1), (3, 4)])
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


def test_its_state_is_on_the_targets_device() -> None:
    target: Any = SimpleNamespace(device=torch.device("meta"))
    drafter = NgramDrafter().for_target(target)
    state = drafter.start(2, 16, 4)
    tokens = torch.zeros(2, 5, dtype=torch.long, device="meta")
    for max_slots in (5, 10):
        draft = drafter.extend(state, None, tokens, tokens[:, 0], max_slots=max_slots)
        draft = drafter.expand(state, tokens[:, :3], tokens[:, :3], 1)
        assert draft.logits.is_meta
    assert all(values.is_meta for values in (state.history, state.lengths, state.paths))
