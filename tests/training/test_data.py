"""Reading conversations, and the mask of the assistant's tokens, down to the token."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoTokenizer

from tests.conftest import CHAT_TARGET, HF_HOME
from training.data import (
    BadLineError,
    ConversationCollator,
    count_tokens,
    load_conversations,
    tokenize_conversation,
    tokenize_conversations,
)

TWO_TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Yo"},
    {"role": "assistant", "content": "Hi"},
]
MARKED_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's does, it writes an empty thought before a reply, if that is the last one, and drops earlier thoughts.
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'].split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_TEXT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
STRICT_TEMPLATE = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user must begin') }}{% endif %}"


@pytest.fixture
def tokenizer() -> Any:
    """The embedded target's, one of its own for each test, which may give it another template."""
    return AutoTokenizer.from_pretrained(CHAT_TARGET)


def to_dataset(*conversations: list[dict[str, str]]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"messages": list(conversations)})


def learned_text(messages: list[dict[str, str]], tokenizer: Any) -> list[str]:
    """The text of each run of tokens under the mask."""
    input_ids, loss_mask = tokenize_conversation(messages, tokenizer)
    runs: list[list[int]] = []
    for position, (token, bit) in enumerate(zip(input_ids, loss_mask, strict=True)):
        if bit and (position == 0 or not loss_mask[position - 1]):
            runs.append([])
        if bit:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def write(path: Path, rows: list[Any]) -> str:
    data = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def sharegpt(*texts: str) -> dict[str, Any]:
    roles = ("human", "gpt")
    return {"conversations": [{"from": roles[index % 2], "value": text} for index, text in enumerate(texts)]}


# The mask


def test_mask_of_the_embedded_target_by_hand(tokenizer: Any) -> None:
    input_ids, loss_mask = tokenize_conversation(TWO_TURNS[:2], tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(input_ids)
    assert list(zip(tokens, loss_mask, strict=True)) == [
        ("<|im_start|>", 0),
        ("user", 0),
        ("Ċ", 0),
        ("Hi", 0),
        ("<|im_end|>", 0),
        ("Ċ", 0),
        ("<|im_start|>", 0),
        *[(token, 0) for token in tokenizer.tokenize("assistant")],
        ("Ċ", 0),
        *[(token, 1) for token in tokenizer.tokenize("Yo")],
        ("<|im_end|>", 1),
        ("Ċ", 0),
    ]


def test_every_turn_of_the_assistant_is_learned(tokenizer: Any) -> None:
    assert learned_text(TWO_TURNS, tokenizer) == ["Yo<|im_end|>", "Hi<|im_end|>"]
    assert tokenize_conversation(TWO_TURNS, tokenizer)[0] == tokenizer.apply_chat_template(TWO_TURNS, return_dict=False)


@pytest.mark.parametrize("num_opening", [1, 2])
def test_what_the_assistant_opens_with_is_kept_but_not_learned(tokenizer: Any, num_opening: int) -> None:
    messages = [TWO_TURNS[1]] * num_opening + TWO_TURNS[2:]
    assert learned_text(messages, tokenizer) == ["Hi<|im_end|>"]
    (row,) = tokenize_conversations(to_dataset(messages), tokenizer, max_length=64)
    assert row["input_ids"] == tokenizer.apply_chat_template(messages, return_dict=False)
    with pytest.raises(ValueError, match="no token of the assistant's"):
        tokenize_conversations(to_dataset(TWO_TURNS[1:2]), tokenizer, max_length=64)


def test_markers_and_search_agree(tokenizer: Any) -> None:
    searched = tokenize_conversation(TWO_TURNS, tokenizer)
    tokenizer.chat_template = MARKED_TEMPLATE
    assert tokenize_conversation(TWO_TURNS, tokenizer) == searched


def test_markers_decide_where_a_template_has_them(tokenizer: Any) -> None:
    tokenizer.chat_template = MARKED_TEMPLATE.replace(
        "<|im_end|>{% endgeneration %}", "{%- endgeneration -%}<|im_end|>"
    )
    assert learned_text(TWO_TURNS, tokenizer) == ["Yo", "Hi"]


@pytest.mark.parametrize(
    "reply", [" leads", "trails ", "\n\nlines\n\n", "<|im_end|> quoted", "ünï©ödé 🙂 end", "a", "  "]
)
def test_replies_are_learned_as_they_are_rendered(tokenizer: Any, reply: str) -> None:
    messages = [TWO_TURNS[0], {"role": "assistant", "content": reply}, *TWO_TURNS]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    learned = learned_text(messages, tokenizer)
    assert len(learned) == 3
    # A line break that begins a reply may share its token with the header's, which is given.
    assert f"{reply}<|im_end|>".endswith(learned[0])
    assert learned[0].strip() == f"{reply}<|im_end|>".strip()
    assert learned[1:] == ["Yo<|im_end|>", "Hi<|im_end|>"]
    assert tokenizer.decode(tokenize_conversation(messages, tokenizer)[0]) == text


def test_thinking_template(tokenizer: Any) -> None:
    tokenizer.chat_template = THINKING_TEMPLATE
    assert learned_text(TWO_TURNS, tokenizer) == ["Yo<|im_end|>", "<think>\n\n</think>\n\nHi<|im_end|>"]


def test_a_reply_that_the_template_changes_is_not_taken_for_another(tokenizer: Any) -> None:
    tokenizer.chat_template = THINKING_TEMPLATE.replace("</think>')[-1]", "x')[0]")
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "Max"}, {"role": "user", "content": "was Max"}]
    with pytest.raises(ValueError, match="generation %} markers"):
        tokenize_conversation([*messages[:2], *TWO_TURNS], tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m", "{{ m['content'] if m['role'] == 'user' else m")
    with pytest.raises(ValueError, match="generation %} markers"):
        tokenize_conversation(messages, tokenizer)


def test_template_without_special_tokens_learns_the_text_alone(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN_TEXT_TEMPLATE
    messages = [*TWO_TURNS[:1], {"role": "assistant", "content": "Sure, go on."}, *TWO_TURNS[:1]]
    assert [text.strip() for text in learned_text(messages, tokenizer)] == ["Sure, go on."]


# Rows


def test_truncation_cuts_rows_and_never_shifts_the_mask(tokenizer: Any) -> None:
    input_ids, loss_mask = tokenize_conversation(TWO_TURNS, tokenizer)
    first = loss_mask.index(1)
    for max_length in (first + 1, len(input_ids) - 3, len(input_ids) + 9):
        (row,) = tokenize_conversations(to_dataset(TWO_TURNS), tokenizer, max_length=max_length)
        assert row == {"input_ids": input_ids[:max_length], "loss_mask": loss_mask[:max_length]}
    with pytest.raises(ValueError, match=f'max_length={first}": 1'):
        tokenize_conversations(to_dataset(TWO_TURNS), tokenizer, max_length=first)


@pytest.mark.parametrize("is_marked", [False, True])
def test_long_conversations_are_no_news(tokenizer: Any, caplog: pytest.LogCaptureFixture, is_marked: bool) -> None:
    """Cutting is asked for: no warning about rows longer than the tokenizer's limit."""
    if is_marked:
        tokenizer.chat_template = MARKED_TEMPLATE
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "Yo " * 2000}]
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # it does not propagate
    (row,) = tokenize_conversations(to_dataset(messages), tokenizer, max_length=99)
    logger.removeHandler(caplog.handler)
    assert len(row["input_ids"]) == 99
    assert not caplog.records


def test_unusable_conversations_are_dropped_and_counted(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer.chat_template = STRICT_TEMPLATE + THINKING_TEMPLATE.replace("</think>", "x")
    unanswered, answer_first, changed = (
        TWO_TURNS[:1],
        TWO_TURNS[1:],
        [TWO_TURNS[0], {"role": "assistant", "content": "axe"}],
    )
    conversations = to_dataset(unanswered, TWO_TURNS, answer_first, changed, TWO_TURNS)
    with caplog.at_level(logging.WARNING):
        rows = tokenize_conversations(conversations, tokenizer, max_length=64)
    assert len(rows) == 2
    assert rows.column_names == ["input_ids", "loss_mask"]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 3
    assert all(warning.startswith("dropped 1 of 5 conversations: ") for warning in warnings)
    assert any("a user must begin" in warning for warning in warnings)


def test_rows_are_the_same_with_several_processes(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations = to_dataset(*[TWO_TURNS] * 5)
    single = tokenize_conversations(conversations, tokenizer, max_length=64).to_dict()
    assert tokenize_conversations(conversations, tokenizer, max_length=64, num_proc=2).to_dict() == single


def test_tokenizers_that_cannot_mask_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="max_length is 0"):
        tokenize_conversations(to_dataset(TWO_TURNS), tokenizer, max_length=0)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        tokenize_conversations(to_dataset(TWO_TURNS), tokenizer, max_length=64)


def test_collator_pads_on_the_right() -> None:
    rows: list[dict[str, list[int]]] = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [8], "loss_mask": [1]},
    ]
    batch = ConversationCollator(9, multiple_of=4)(rows)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7, 9], [8, 9, 9, 9]],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0]],
        "loss_mask": [[0, 1, 1, 0], [1, 0, 0, 0]],
    }
    assert all(tensor.dtype == torch.long for tensor in batch.values())
    assert ConversationCollator(0)(rows)["input_ids"].shape == (2, 8)
    assert ConversationCollator(0, multiple_of=1)(rows)["input_ids"].shape == (2, 3)


def test_tokens_are_counted_where_there_is_a_loss(tokenizer: Any) -> None:
    rows = tokenize_conversations(to_dataset(TWO_TURNS, TWO_TURNS[:1], TWO_TURNS[:2]), tokenizer, max_length=64)
    expected: Counter[int] = Counter()
    for row in rows:
        expected.update(token for token, bit in zip(row["input_ids"], row["loss_mask"], strict=True) if bit)
    counts = count_tokens(rows, len(tokenizer))
    assert counts.shape == (4096,)
    assert counts.dtype == torch.long
    assert {token: count for token, count in enumerate(counts.tolist()) if count} == expected
    with pytest.raises(ValueError, match="with a vocabulary of 2"):
        count_tokens(rows, 2)


# Reading


def test_every_form_of_file_reads_the_same(tmp_path: Path) -> None:
    rows = [sharegpt("Hi", "Yo", "Yo", "Hi"), {"messages": TWO_TURNS}, {"conversations": TWO_TURNS, "id": 3}]
    array = json.dumps(rows, indent=1)
    files = [
        write(tmp_path / "a.jsonl", rows),
        write(tmp_path / "b.jsonl.gz", rows),
        write(tmp_path / "c.json", rows),
        write(tmp_path / "d.json", [array]),
        write(tmp_path / "e.json.gz", [array]),
    ]
    for file in files:
        dataset = load_conversations([file])
        assert dataset.column_names == ["messages"]
        assert dataset["messages"][:] == [TWO_TURNS] * 3
    (tmp_path / "notes.txt").write_text("not data")
    assert len(load_conversations([str(tmp_path)])) == 15
    assert len(load_conversations([files[0], files[1]], max_samples=4)) == 4


def test_roles_are_those_of_the_template(tmp_path: Path) -> None:
    turns = [{"from": role, "value": role} for role in ("system", "human", "gpt", "user", "assistant")]
    (messages,) = load_conversations([write(tmp_path / "a.jsonl", [{"conversations": turns}])])["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]


def test_order_and_limit(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", [sharegpt(f"{name}{i}", "Yo") for i in range(3)]) for name in "ab"]
    texts = [messages[0]["content"] for messages in load_conversations(files, max_samples=4)["messages"]]
    assert texts == ["a0", "a1", "a2", "b0"]
    assert len(load_conversations(files, max_samples=3)) == 3
    assert len(load_conversations(files, max_samples=99)) == 6
    assert len(load_conversations([str(tmp_path)], max_samples=3)) == 3


BAD_LINES = {
    "": "the line is empty",
    '{"conversations": [': "Expecting value",
    "[]": "expected an object, got list",
    '{"text": "Hi"}': "got the keys ['text']",
    '{"messages": []}': "expected a non-empty list",
    '{"messages": ["Hi"]}': "expected a turn with role and content, got str",
    '{"messages": [{"role": "narrator", "content": "Hi"}]}': "unknown role 'narrator'; known roles: human",
    '{"messages": [{"role": "user", "content": null}]}': "content of a user turn is NoneType",
}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json"])
@pytest.mark.parametrize(("line", "message"), BAD_LINES.items())
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str, suffix: str) -> None:
    file = write(tmp_path / f"a{suffix}", [sharegpt("Hi", "Yo"), line, sharegpt("Hi", "Yo")])
    with pytest.raises(BadLineError) as error:
        load_conversations([file])
    assert f"{file}, line 2: " in str(error.value)
    assert message in str(error.value)
    assert "--skip_bad_lines" in str(error.value)


def test_bad_lines_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*BAD_LINES, sharegpt("Hi", "Yo"), "", sharegpt("Yo", "Hi")]
    file = write(tmp_path / "a.jsonl", rows)
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(load_conversations([file], skip_bad_lines=True)) == 2
        (warning,) = [record.getMessage() for record in caplog.records]
        assert warning.startswith(f"skipped {len(BAD_LINES) + 1} malformed lines; the first: {file}, line 1: the line")
    with pytest.raises(BadLineError):
        load_conversations([file])


def test_a_torn_file_is_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    data = gzip.compress((json.dumps(sharegpt("Hi", "Yo")) + "\n").encode())
    file.write_bytes(data + data[:-9])
    with pytest.raises(BadLineError, match="line 3: the file cannot be read from here on"):
        load_conversations([str(file)])
    assert len(load_conversations([str(file)], skip_bad_lines=True)) == 2


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    write(file, [sharegpt("Hi", "Yo")])
    assert load_conversations([str(file)])["messages"][0][0]["content"] == "Hi"
    changed = file.stat().st_mtime_ns
    write(file, [sharegpt("Ha", "Yo")])
    os.utime(file, ns=(changed + 1, changed + 1))
    assert load_conversations([str(file)])["messages"][0][0]["content"] == "Ha"


def test_the_cache_is_the_tests_own() -> None:
    assert Path(datasets.config.HF_DATASETS_CACHE).is_relative_to(HF_HOME)


def test_what_is_read_and_tokenized_is_cached(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.jsonl", [sharegpt("Hi", "Yo")])
    rows = tokenize_conversations(load_conversations([file]), tokenizer, max_length=64)
    fail = pytest.fail  # neither reads nor tokenizes a second time
    monkeypatch.setattr("training.data.read_records", lambda path: fail("read again"))
    again = AutoTokenizer.from_pretrained(CHAT_TARGET)
    monkeypatch.setattr("training.data.tokenize_conversation", lambda messages, tokenizer: fail("tokenized again"))
    assert tokenize_conversations(load_conversations([file]), again, max_length=64).to_dict() == rows.to_dict()


def test_missing_and_empty_places_are_named(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nowhere"), "nowhere.jsonl", "./nowhere"):
        with pytest.raises(ValueError, match="does not exist; give an existing file"):
            load_conversations([path])
    with pytest.raises(ValueError, match=r"has no files ending in \.json,"):
        load_conversations([str(tmp_path)])
    for suffix, rows in ((".jsonl", []), (".jsonl.gz", []), (".json", ["[]"])):
        empty = write(tmp_path / f"a{suffix}", rows)
        with pytest.raises(BadLineError, match="line 1: the file is empty"):
            load_conversations([empty])
        with pytest.raises(ValueError, match="no conversations in"):
            load_conversations([empty], skip_bad_lines=True)
    with pytest.raises(ValueError, match="max_samples is 0"):
        load_conversations([empty], max_samples=0)


def test_hub_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub fills what a row lacks with None; a folder stands in for it."""
    rows = [{"messages": TWO_TURNS, "conversations": None}, {"messages": None, "conversations": None}]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.Dataset.from_list(rows))
    with pytest.raises(BadLineError, match=r"some/set \(test\), row 2: expected a non-empty list"):
        load_conversations(["some/set"], split="test")
    assert load_conversations(["some/set"], skip_bad_lines=True)["messages"][:] == [TWO_TURNS]
