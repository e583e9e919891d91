"""Training rows: what is cut and what is dropped; counts of tokens; what is learned and held out."""

import logging
from collections import Counter
from typing import Any

import pytest
import torch

from draftsmith.training.data.chat_tokens import drop_unusable, tokenize_conversations
from draftsmith.training.data.collation import count_tokens
from draftsmith.training.data.options import DataArguments
from draftsmith.training.data.training_sets import load_datasets
from tests.training.conversation_cases import (
    STRICT_TEMPLATE,
    THINKING_TEMPLATE,
    TWO_TURNS,
    replies,
    to_dataset,
    tokenize,
    write,
)
from tests.training.runner import WORDS


def test_truncation_cuts_rows_and_never_shifts_the_mask(tokenizer: Any) -> None:
    input_ids, loss_mask = tokenize(TWO_TURNS, tokenizer)
    first = loss_mask.index(1)
    for max_length in (first + 1, len(input_ids) - 3, len(input_ids) + 9):
        (row,) = drop_unusable(tokenize_conversations(to_dataset(TWO_TURNS), tokenizer, max_length=max_length))
        assert row == {"input_ids": input_ids[:max_length], "loss_mask": loss_mask[:max_length]}
    with pytest.raises(ValueError, match=f'max_length={first}": 1'):
        drop_unusable(tokenize_conversations(to_dataset(TWO_TURNS), tokenizer, max_length=first))


def test_unusable_conversations_are_dropped_and_counted(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer.chat_template = STRICT_TEMPLATE + THINKING_TEMPLATE.replace("</think>", "x")
    unanswered, answer_first, changed = (
        TWO_TURNS[:1],
        TWO_TURNS[1:],
        [TWO_TURNS[0], {"role": "assistant", "content": "axe"}],
    )
    conversations = to_dataset(unanswered, TWO_TURNS, answer_first, changed, TWO_TURNS)
    with caplog.at_level(logging.WARNING):
        rows = drop_unusable(tokenize_conversations(conversations, tokenizer, max_length=64))
    assert len(rows) == 2
    assert rows.column_names == ["input_ids", "loss_mask"]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 3
    assert all(warning.startswith("dropped 1 of 5 conversations: ") for warning in warnings)
    assert any("a user must begin" in warning for warning in warnings)


def test_tokenizers_that_cannot_mask_are_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        drop_unusable(tokenize_conversations(to_dataset(TWO_TURNS), tokenizer, max_length=64))


def test_tokens_are_counted_where_there_is_a_loss(tokenizer: Any) -> None:
    rows = drop_unusable(
        tokenize_conversations(to_dataset(TWO_TURNS, TWO_TURNS[:1], TWO_TURNS[:2]), tokenizer, max_length=64)
    )
    expected: Counter[int] = Counter()
    for row in rows:
        expected.update(token for token, bit in zip(row["input_ids"], row["loss_mask"], strict=True) if bit)
    counts = count_tokens(rows, len(tokenizer))
    assert counts.shape == (4096,)
    assert counts.dtype == torch.long
    assert {token: count for token, count in enumerate(counts.tolist()) if count} == expected
    with pytest.raises(ValueError, match="target's vocabulary has 2 tokens: give a target with its own tokenizer"):
        count_tokens(rows, 2)


# What a run learns from and holds out: several sets, splits.


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


def test_errors_name_the_option_of_a_set(sets: list[str], word_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=f"^dataset {__file__} is a file"):
        load([__file__], word_tokenizer)
    with pytest.raises(ValueError, match=f"^eval_dataset {__file__} is a file"):
        load(sets, word_tokenizer, eval_dataset=[__file__])
