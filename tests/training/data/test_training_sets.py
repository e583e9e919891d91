"""What a run learns from and holds out: several sets, splits."""

from __future__ import annotations

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


def test_every_conversation_is_used_once(sets: list[str], word_tokenizer: Any) -> None:
    expected = [*WORDS[:20], *WORDS[30:40]]
    assert load(sets, word_tokenizer, validation_fraction=0)[0] == expected
    assert load(sets, word_tokenizer, validation_fraction=0, dataset_split=["train", "test"])[0] == expected
    assert load(sets, word_tokenizer, validation_fraction=0, max_samples=22)[0] == expected[:22]
    split = ["train", "test"]
    assert load(sets, word_tokenizer, validation_fraction=0, max_samples=22, dataset_split=split)[0] == expected[:22]
    train, held_out = load(sets, word_tokenizer, validation_fraction=0.2)
    assert len(held_out) == 6
    assert sorted(train + held_out) == sorted(expected)
    train, held_out = load(sets[:1], word_tokenizer, eval_dataset=sets[1:])
    assert sorted(train) == sorted(WORDS[:20])
    assert held_out == WORDS[30:40]
