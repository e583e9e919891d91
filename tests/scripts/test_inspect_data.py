"""What inspect_data.py shows and counts, and what it and a training run say of bad input: one line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.scripts import inspect_data
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.training.conversation_cases import sharegpt, tokenize, write
from tests.training.runner import save_chat_target


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_target(tmp_path_factory.mktemp("target"))


def inspect(*options: Any) -> None:
    assert inspect_data.main(["--target", str(CHAT_TARGET), *map(str, options)]) == 0


def test_counts_are_those_of_a_loop_over_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compressed = (REPOSITORY / "examples" / "conversations.jsonl.gz").read_bytes()
    lines = gzip.decompress(compressed).decode().splitlines()[:20]
    long = sharegpt("Hi", "Yo " * 200, "Hi")
    files = [
        write(tmp_path / "a.jsonl", [*lines, "{", sharegpt("Hi"), sharegpt("Yo"), long]),
        write(tmp_path / "b.jsonl", [{"prompt": "Hi", "response": "Yo"}] * 3),
    ]
    report = tmp_path / "out" / "counts.json"
    inspect("--dataset", *files, "--max_length", 99, "--json", report, "--num_rows", 1)
    tokenizer = AutoTokenizer.from_pretrained(CHAT_TARGET)
    lengths, num_trained, num_turns, num_replies = [], 0, 0, 0
    for record in [*map(json.loads, lines), long]:
        roles = {"human": "user", "gpt": "assistant"}
        messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in record["conversations"]]
        ids, mask = tokenize(messages, tokenizer)
        lengths.append(len(ids[:99]))
        num_trained += sum(mask[:99])
        num_turns += len(messages)
        num_replies += sum(message["role"] == "assistant" for message in messages)
    found = json.loads(report.read_text())
    first, second = found["sets"]
    assert (first["num_records"], first["num_conversations"]) == (24, 21)
    assert first["dropped"] == {
        "no token of the assistant's within max_length=99": 2,
        "Expecting property name enclosed in double quotes, column 2": 1,
    }
    assert (first["num_tokens"], first["num_trained_tokens"]) == (sum(lengths), num_trained)
    assert first["trained_share"] == round(num_trained / sum(lengths), 4)
    assert (first["num_turns"], first["num_at_max_length"]) == (num_turns, lengths.count(99))
    assert first["num_replies"] == num_replies
    assert first["lengths"]["0.5"] == sorted(lengths)[10]
    assert (first["lengths"]["0"], first["lengths"]["1"]) == (min(lengths), max(lengths))
    assert second["num_conversations"] == 3
    output = capsys.readouterr().out
    assert f"{files[0]}: 21 conversations of 24 records\n  dropped 2: no token" in output
    assert re.search(rf"turns {num_turns}\b.*\b{num_replies}\b.*\n.*tokens {sum(lengths)}\b.*\b{num_trained}\b", output)
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yo<|im_end|>]]\n" in output


def test_a_training_config_and_a_stream_are_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target_path: Path
) -> None:
    data = write(tmp_path / "a.jsonl", [{"prompt": "word1", "response": "word2"}] * 5)
    config = tmp_path / "c.yaml"
    config.write_text(f"target: {target_path}\nhead_type: medusa\nlearning_rate: 0.1\ndataset: {data}\nmax_steps: 3\n")
    assert inspect_data.main(["--config", str(config), "--num_rows", "0"]) == 0
    assert "5 conversations of 5 records" in capsys.readouterr().out
    assert inspect_data.main(["--config", str(config), "--streaming", "true", "--vocabulary_rows", "3"]) == 0
    output = capsys.readouterr().out
    assert "3 conversations of 3 records" in output
    assert re.search(r"<\|user\|> ?word1 ?<\|end\|> ?<\|assistant\|>\[\[ ?word2 ?<\|end\|>\]\]", output)
    with pytest.raises(
        SystemExit, match=r"draftsmith inspect: unknown key 'datset' on the command line; did you mean 'dataset'\?"
    ):
        inspect_data.main(["--config", str(config), "--datset", "x"])
