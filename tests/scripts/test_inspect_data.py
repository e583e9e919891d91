"""What inspect_data.py shows and counts."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.scripts import inspect_data
from draftsmith.training.data.conversations import load_conversations
from draftsmith.training.data.learned_turns import EMPTY, UNLEARNED
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.training.conversation_cases import sharegpt, tokenize, write
from tests.training.runner import save_chat_target


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_target(tmp_path_factory.mktemp("target"))


def inspect(*options: Any) -> None:
    inspect_data.main(["--target", str(CHAT_TARGET), *map(str, options)])


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
    for name in ("num_records", "num_conversations", "num_turns", "num_replies", "num_tokens", "num_trained_tokens"):
        assert found["total"][name] == first[name] + second[name], name
    assert found["total"]["dropped"] == first["dropped"]
    output = capsys.readouterr().out
    assert f"{files[0]}: 21 conversations of 24 records\n  dropped 2: no token" in output
    assert re.search(rf"turns {num_turns}\b.*\b{num_replies}\b.*\n.*tokens {sum(lengths)}\b.*\b{num_trained}\b", output)
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yo<|im_end|>]]\n" in output


def test_the_first_samples_are_those_that_training_reads(tmp_path: Path) -> None:
    """Of all files and sets together; a set that training does not reach is not counted."""
    (tmp_path / "folder").mkdir()
    for name, count in (("folder/a.jsonl", 2), ("folder/b.jsonl", 3), ("c.jsonl", 3), ("d.jsonl", 1)):
        write(tmp_path / name, ["{", *[{"prompt": "Hi", "response": name}] * count])
    report = tmp_path / "counts.json"
    sets = (tmp_path / "folder", tmp_path / "c.jsonl", tmp_path / "d.jsonl")
    for max_samples, expected in ((4, [4]), (7, [5, 2]), (9, [5, 3, 1])):
        inspect("--dataset", *sets, "--max_samples", max_samples, "--json", report)
        found = json.loads(report.read_text())
        assert [each["num_conversations"] for each in found["sets"]] == expected
        rows = load_conversations([*map(str, sets)], max_samples=max_samples, skip_bad_lines=True)
        assert found["total"]["num_conversations"] == len(rows) == max_samples


def test_what_is_not_learned_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calls that the template does not write, empty replies, and replies and columns that the data or we leave out."""
    user, good, empty = (
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", ""))
    )
    call = {**empty, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
    other = {**empty, "tool_calls": [{"function": {"name": "jump", "arguments": "{}"}}]}
    records = [
        {"messages": [user, call, user, good]},
        {"messages": [user, good, user, other]},
        {"messages": [user, empty]},
        {"messages": [user, empty, user, empty, user, good]},
        {"messages": [user, {**good, "weight": 0}, user, good]},
        {"messages": [{"role": "system", "content": "x"}, user, good], "system": "y"},
        {"prompt": "a", "completion": "b", "label": False},
    ]
    report = tmp_path / "counts.json"
    inspect("--dataset", write(tmp_path / "a.jsonl", records), "--json", report, "--num_rows", 0)
    found = json.loads(report.read_text())
    (counts,) = found["sets"]
    assert (counts["num_records"], counts["num_conversations"]) == (7, 3)
    assert sorted(counts["dropped"].values()) == [1, 1, 2]
    assert counts["dropped"]["the chat template rejects it (it does not write tool calls)"] == 2
    assert counts["dropped"][f"nothing to learn: {EMPTY}"] == 1
    (note,) = counts["notes"].keys() - {EMPTY, UNLEARNED}
    assert "`system`" in note
    assert counts["notes"] == {EMPTY: 2, UNLEARNED: 1, note: 1}
    assert found["total"]["notes"] == counts["notes"]
    assert f"\n  2 {EMPTY}\n  1 {UNLEARNED}\n" in capsys.readouterr().out


def test_rows_end_where_the_targets_positions_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in training: 1,024 positions, though max_length is 2,048 by default."""
    report = tmp_path / "counts.json"
    inspect("--dataset", write(tmp_path / "a.jsonl", [sharegpt("Hi", "Yo " * 2000)]), "--json", report)
    (counts,) = json.loads(report.read_text())["sets"]
    assert (counts["num_tokens"], counts["num_at_max_length"]) == (1024, 1)
    assert "1 have max_length (1024) tokens; the rest is cut off" in capsys.readouterr().out


def test_pieces_of_a_row_are_its_text() -> None:
    """Characters of several tokens, of which one begins the reply; special tokens apart."""
    tokenizer = AutoTokenizer.from_pretrained(CHAT_TARGET)
    messages = [{"role": "user", "content": "🙂 é"}, {"role": "assistant", "content": "🙂 [[a]]"}]
    ids, mask = tokenize(messages, tokenizer)
    pieces = [*inspect_data.describe_row({"input_ids": ids, "loss_mask": mask}, tokenizer)]
    assert "".join(text for text, _ in pieces) == tokenizer.decode(ids)
    assert [(text, kind) for text, kind in pieces if "trained" in kind] == [
        ("🙂 [[a]]", "trained"),
        ("<|im_end|>", "trained special"),
    ]
    assert Counter(kind for _, kind in pieces)["special"] == 3


def test_a_training_config_and_a_stream_are_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", [{"prompt": "word1", "response": "word2"}] * 5)
    config = tmp_path / "c.yaml"
    config.write_text(f"target: {target_path}\nhead_type: medusa\nlearning_rate: 0.1\ndataset: {data}\nmax_steps: 3\n")
    inspect_data.main(["--config", str(config), "--num_rows", "0"])
    assert "5 conversations of 5 records" in capsys.readouterr().out
    monkeypatch.setattr("draftsmith.training.data.set_statistics.VOCABULARY_ROWS", 3)
    inspect_data.main(["--config", str(config), "--streaming", "true"])
    output = capsys.readouterr().out
    assert "3 conversations of 3 records" in output
    assert re.search(r"<\|user\|> ?word1 ?<\|end\|> ?<\|assistant\|>\[\[ ?word2 ?<\|end\|>\]\]", output)
    with pytest.raises(SystemExit, match=r"^draftsmith inspect: unknown key 'datset' .* 'dataset'\?"):
        inspect_data.main(["--config", str(config), "--datset", "x"])
