"""What a run learns from and holds out: several sets, weights, splits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from draftsmith.training.data.options import DataArguments
from draftsmith.training.data.training_sets import load_datasets
from tests.training.conversation_cases import replies, write
from tests.training.runner import WORDS


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A set of 20 conversations whose reply is word0 to word19, and one of 10 with word30 to word39."""
    folder = tmp_path_factory.mktemp("sets")
    rows = [{"prompt": "word50", "response": word} for word in WORDS]
    return [write(folder / "a.jsonl", rows[:20]), write(folder / "b.jsonl", rows[30:40])]


def load(sets: list[str], tokenizer: Any, **options: Any) -> tuple[list[str], list[str]]:
    seed = options.pop("seed", 0)
    train, held_out = load_datasets(DataArguments(dataset=sets, **options), tokenizer, seed=seed)
    return replies(train, tokenizer), replies(held_out, tokenizer) if held_out is not None else []


def test_without_weights_every_conversation_is_used_once(sets: list[str], word_tokenizer: Any) -> None:
    expected = [*WORDS[:20], *WORDS[30:40]]
    assert load(sets, word_tokenizer, validation_fraction=0)[0] == expected
    assert load(sets, word_tokenizer, validation_fraction=0, dataset_split=["train", "test"])[0] == expected
    assert load(sets, word_tokenizer, validation_fraction=0, max_samples=22)[0] == expected[:22]
    split = ["train", "test"]
    assert load(sets, word_tokenizer, validation_fraction=0, max_samples=22, dataset_split=split)[0] == expected[:22]
    train, held_out = load(sets, word_tokenizer, validation_fraction=0.2)
    assert len(held_out) == 6
    assert sorted(train + held_out) == sorted(expected)


def test_weights_say_how_often_a_set_is_drawn_from(sets: list[str], word_tokenizer: Any) -> None:
    options = {"dataset_weights": [1, 3], "validation_fraction": 0}
    train, _ = load(sets, word_tokenizer, **options)
    counts = Counter("b" if word in WORDS[30:40] else "a" for word in train)
    assert counts["b"] == 10  # of which an epoch has all: it is exhausted first
    assert 0 < counts["a"] < 10
    assert len(set(train)) == len(train)
    assert load(sets, word_tokenizer, **options)[0] == train
    assert load(sets, word_tokenizer, **options, seed=1)[0] != train
    assert len(load(sets, word_tokenizer, **options, max_samples=5)[0]) == 5
    everything, _ = load(sets, word_tokenizer, **options, stopping_strategy="all_exhausted")
    assert set(everything) == {*WORDS[:20], *WORDS[30:40]}
    assert len(everything) > 40
    shares = [Counter(word in WORDS[30:40] for word in load(sets, word_tokenizer, **{
        **options, "stopping_strategy": "all_exhausted"}, seed=seed)[0]) for seed in range(8)]  # fmt: skip
    assert 0.68 < sum(share[True] for share in shares) / sum(share.total() for share in shares) < 0.82


def test_what_is_held_out_of_a_mixture_is_not_learned(sets: list[str], word_tokenizer: Any) -> None:
    options = {"dataset_weights": [1, 3], "stopping_strategy": "all_exhausted", "validation_fraction": 0.3}
    train, held_out = load(sets, word_tokenizer, **options)
    assert not set(train) & set(held_out)
    assert set(train) | set(held_out) == {*WORDS[:20], *WORDS[30:40]}
    assert load(sets, word_tokenizer, **options, max_eval_samples=2)[1] == held_out[:2]
    train, held_out = load(sets[:1], word_tokenizer, dataset_weights=[1], eval_dataset=sets[1:])
    assert sorted(train) == sorted(WORDS[:20])
    assert held_out == WORDS[30:40]
