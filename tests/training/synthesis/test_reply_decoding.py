"""Turns that the target writes: the same whatever heads, tree and batch; and what is wrong with them."""

import copy
from functools import cache
from typing import Any

import pytest

from draftsmith.inference import Decoder, DynamicTree, NgramDrafter
from draftsmith.training.synthesis.reply_decoding import (
    TurnSettings,
    drop_marks,
    find_problem,
    is_looping,
    turn_seed,
    write_turns,
)
from tests.tiny_targets import random_prompt, tiny_target

STOP_IDS = set(range(20, 26))
PROMPTS = [random_prompt(length, seed=length)[0].tolist() for length in (3, 30, 9, 4, 17, 9, 25)]
SEEDS = [turn_seed(5, f"row {row}", 1) for row in range(len(PROMPTS))]


@cache
def shared_decoder(*, has_drafter: bool = False) -> Decoder:
    drafter = NgramDrafter() if has_drafter else None
    return Decoder(tiny_target("llama"), drafter, tree=DynamicTree(depth=3, top_k=2, num_nodes=6) if drafter else None)


def write(decoder: Decoder, settings: TurnSettings, size: int, **options: Any) -> list[list[int]]:
    """The turns after all prompts, so many of them together."""
    turns: list[list[int]] = []
    for start in range(0, len(PROMPTS), size):
        part = slice(start, start + size)
        turns += write_turns(
            decoder, settings, PROMPTS[part], **{"seeds": SEEDS[part], "stop_ids": STOP_IDS, **options}
        )[0]
    return turns


def test_sampled_turns_depend_on_their_seed_alone() -> None:
    """One by one and plain = together, backwards and drafted."""
    sampling = TurnSettings(max_new_tokens=20, temperature=0.7, top_p=0.9, top_k=5)
    expected = write(shared_decoder(), sampling, 1)
    drafted = shared_decoder(has_drafter=True)
    together, _ = write_turns(drafted, sampling, PROMPTS[::-1], stop_ids=STOP_IDS, seeds=SEEDS[::-1])
    assert together == expected[::-1]
    others = [seed + 1 for seed in SEEDS]
    assert write_turns(drafted, sampling, PROMPTS, stop_ids=STOP_IDS, seeds=others)[0] != expected


def test_stop_strings_of_the_target_end_turns(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a turn gets the token that ends turns. One by one = together."""
    model: Any = tiny_target("llama")
    settings = TurnSettings(max_new_tokens=12, temperature=0)
    plain = write(shared_decoder(), settings, 1)
    rows = [row for row, turn in enumerate(plain) if turn[-1] not in STOP_IDS]
    assert len(rows) > 1, "texts must be long for this test to mean anything"
    monkeypatch.setattr(model, "generation_config", copy.deepcopy(model.generation_config))
    last = [plain[row][place] for row, place in zip(rows[:2], (4, 7), strict=True)]
    strings = [chat_tokenizer.decode(token) for token in last]
    model.generation_config.stop_strings = strings
    stopping = {token for token in range(128) if any(text in chat_tokenizer.decode(token) for text in strings)}
    expected = []
    for turn in plain:
        end = next((place for place, token in enumerate(turn, 1) if token in stopping), len(turn))
        expected.append([*turn[:end], *([min(STOP_IDS)] if end < len(turn) else [])])
    assert [expected[row] != plain[row] for row in rows[:2]] == [True, True]
    for size in (1, 3, 8):
        assert write(Decoder(model), settings, size, tokenizer=chat_tokenizer) == expected


def test_seeds_name_run_conversation_and_turn() -> None:
    seeds = {turn_seed(seed, name, turn) for seed in range(3) for name in ("a", "b", "1", "11") for turn in range(12)}
    assert len(seeds) == 3 * 4 * 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert turn_seed(0, "a", 0) == turn_seed(0, "a", 0) == 7588792172602473380, "other seeds are other data"


def test_bad_turns_are_told_from_good_ones() -> None:
    yes = [40, 41, 42, 43]
    expected = {
        (*yes, 2): "",
        (*yes,): "truncated",
        (2,): "empty",
        (): "truncated",
        (*yes, 1, *yes, 2): "special token inside",
        (*[7, 8] * 12, 2): "looping",
        (*[7, 8] * 12,): "looping",
    }
    assert {tokens: find_problem(tokens, {2}, {0, 1, 2}) for tokens in expected} == expected


def test_marks_of_its_own_are_no_special_tokens_inside() -> None:
    """The longest first; what is left of them is told."""
    marks = [[5, 6, 7], [5]]
    expected = {
        (40, 5, 41, 2): "",
        (5, 6, 7, 40, 2): "",
        (5, 6, 40, 2): "special token inside",
        (6, 5, 2): "special token inside",
        (40, 1, 5, 2): "special token inside",
    }
    assert {tokens: find_problem(tokens, {2}, {1, 2, 5, 6}, marks) for tokens in expected} == expected
    assert drop_marks([1, 7, 8, 2, 7], [[7, 8], [2]]) == [1, 7]


def test_loops() -> None:
    assert is_looping([7, 8] * 12)
    assert not is_looping([7, 8] * 11)
    assert not is_looping(list(range(30)))
    assert is_looping([1, 2, 3, *[5] * 24])
    assert not is_looping([*[5] * 24, 1])
    assert is_looping(list(range(32)) * 4)
    assert not is_looping(list(range(33)) * 4)
