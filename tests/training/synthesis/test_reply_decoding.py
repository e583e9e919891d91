"""Turns that the target writes: those of `generate`, whatever heads, tree and batch; and what is wrong with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from draftsmith.inference import Decoder, DynamicTree, NgramDrafter
from draftsmith.training.synthesis.reply_decoding import (
    TurnDecoder,
    TurnSettings,
    WrittenTurn,
    drop_marks,
    find_problem,
    is_looping,
    turn_seed,
)
from tests.tiny_targets import random_prompt, tiny_target

STOP_IDS = set(range(20, 26))
PROMPTS = [random_prompt(length, seed=length)[0].tolist() for length in (3, 30, 9, 4, 17, 9, 25)]
SEEDS = [turn_seed(5, f"row {row}", 1) for row in range(len(PROMPTS))]


@cache
def shared_decoder(family: str = "llama", *, has_drafter: bool = False) -> Decoder:
    drafter = NgramDrafter() if has_drafter else None
    return Decoder(tiny_target(family), drafter, tree=DynamicTree(depth=3, top_k=2, num_nodes=6) if drafter else None)


def write_alone(writer: TurnDecoder, seeds: Sequence[int]) -> list[WrittenTurn]:
    return [
        turn
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
        for turn in writer.write([prompt], stop_ids=STOP_IDS, seeds=[seed])
    ]


def test_turns_are_those_of_plain_generate() -> None:
    """Rows of a batch with a drafter against transformers' `generate` for each of them by itself."""
    decoder = shared_decoder("gemma3", has_drafter=True)
    writer = TurnDecoder(decoder, TurnSettings(max_new_tokens=70, temperature=0))
    turns = writer.write(PROMPTS, stop_ids=STOP_IDS, seeds=SEEDS)
    lengths = set()
    for prompt, turn in zip(PROMPTS, turns, strict=True):
        ids = torch.tensor([prompt])
        alone = decoder.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=70, do_sample=False,
            eos_token_id=sorted(STOP_IDS), pad_token_id=0,
        )  # fmt: skip
        assert turn.token_ids == alone[0, ids.shape[1] :].tolist()
        lengths.add(len(turn.token_ids))
    assert len(lengths) > 3, "rows must leave the batch at different times for this test to mean anything"
    assert writer.stats.num_new_tokens == sum(len(turn.token_ids) for turn in turns)


def test_sampled_turns_depend_on_their_seed_alone() -> None:
    """One by one and plain = together, backwards and drafted."""
    sampling = TurnSettings(max_new_tokens=20, temperature=0.7, top_p=0.9, top_k=5)
    alone = TurnDecoder(shared_decoder(), sampling)
    together = TurnDecoder(shared_decoder(has_drafter=True), sampling)
    expected = write_alone(alone, SEEDS)
    assert together.write(PROMPTS[::-1], stop_ids=STOP_IDS, seeds=SEEDS[::-1]) == expected[::-1]
    assert write_alone(alone, [seed + 1 for seed in SEEDS]) != expected


def test_stop_strings_of_the_target_end_turns(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a turn gets the token that ends turns. One by one = together."""
    model: Any = tiny_target("llama")
    settings, options = TurnSettings(max_new_tokens=12, temperature=0), {"stop_ids": STOP_IDS, "seeds": SEEDS}
    plain = write_alone(TurnDecoder(shared_decoder(), settings), SEEDS)
    rows = [row for row, turn in enumerate(plain) if turn.problem == "truncated"]
    assert len(rows) > 1, "texts must be long for this test to mean anything"
    monkeypatch.setattr(model, "generation_config", copy.deepcopy(model.generation_config))
    last = [plain[row].token_ids[place] for row, place in zip(rows[:2], (4, 7), strict=True)]
    strings = [chat_tokenizer.decode(token) for token in last]
    model.generation_config.stop_strings = strings
    stopping = {token for token in range(128) if any(text in chat_tokenizer.decode(token) for text in strings)}
    expected = []
    for turn in plain:
        end = next((place for place, token in enumerate(turn.token_ids, 1) if token in stopping), len(turn.token_ids))
        is_cut = end < len(turn.token_ids)
        expected.append([*turn.token_ids[:end], *([min(STOP_IDS)] if is_cut else [])])
    assert [expected[row] != plain[row].token_ids for row in rows[:2]] == [True, True]
    writer = TurnDecoder(Decoder(model), settings, tokenizer=chat_tokenizer)
    for turns in (writer.write(PROMPTS, **options), write_alone(writer, SEEDS)):
        assert [turn.token_ids for turn in turns] == expected
        assert [turns[row].problem for row in rows[:2]] == ["", ""]


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
