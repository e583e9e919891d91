"""Reading conversations from files, folders and hub ids."""

import gzip
import json
import logging
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from draftsmith.training.data.chat_tokens import drop_unusable, tokenize_conversations
from draftsmith.training.data.conversations import BadLineError, Place, iterate_place, load_conversations
from draftsmith.training.data.records import read_records
from draftsmith.training.synthesis.prompts import read_prompts
from tests.conftest import CHAT_TARGET
from tests.training.conversation_cases import TWO_TURNS, sharegpt, to_messages, write


def test_every_form_of_file_reads_the_same(tmp_path: Path) -> None:
    rows = [sharegpt("Hi", "Yo", "Yo", "Hi"), {"messages": TWO_TURNS}, {"conversations": TWO_TURNS, "id": 3}]
    array = json.dumps(rows, indent=1)
    files = [
        write(tmp_path / "a.jsonl", rows),
        write(tmp_path / "b.jsonl.gz", rows),
        write(tmp_path / "c.json", rows),
        write(tmp_path / "d.json", [array]),
        write(tmp_path / "e.json.gz", [array]),
        write(tmp_path / "f.jsonl", ["\ufeff" + "\n".join(map(json.dumps, rows))]),  # as Windows programs begin files
    ]
    for file in files:
        dataset = load_conversations([file])
        assert dataset.column_names == ["conversation"]
        assert to_messages(dataset) == [TWO_TURNS] * 3
    (tmp_path / "notes.txt").write_text("not data")
    assert len(load_conversations([str(tmp_path)])) == 18
    assert len(load_conversations([files[0], files[1]], max_samples=4)) == 4


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_may_be_one_object(indent: int | None, suffix: str, tmp_path: Path) -> None:
    file = write(tmp_path / f"a{suffix}", [json.dumps({"messages": TWO_TURNS}, indent=indent)])
    assert to_messages(load_conversations([file])) == [TWO_TURNS]


@pytest.mark.parametrize(("cut", "times", "line"), [(-12, 1, 10), (None, 2, 13)])
def test_a_damaged_json_file_is_named_with_the_forms(cut: int | None, times: int, line: int, tmp_path: Path) -> None:
    """Half of a pretty-printed object, and two of them in one file."""
    text = json.dumps({"messages": TWO_TURNS[:2]}, indent=2)[:cut]
    file = write(tmp_path / "a.json", ["\n".join([text] * times)])
    with pytest.raises(ValueError, match=rf"a\.json, line {line}: .*one record a line"):
        load_conversations([file])


def test_the_first_line_of_several_may_be_damaged(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", ['{"messages": [', {"messages": TWO_TURNS}])
    assert to_messages(load_conversations([file], skip_bad_lines=True)) == [TWO_TURNS]


def test_a_system_column_that_is_left_out_is_warned_of(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    system = {"role": "system", "content": "Be brief."}
    row = {"messages": [system, *TWO_TURNS], "system": "Be kind."}
    file = write(tmp_path / "a.jsonl", [row, row, {**row, "system": "Be brief."}, {**row, "system": None}])
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        assert len(drop_unusable(tokenize_conversations(load_conversations([file]), tokenizer, max_length=64))) == 4
        (warning,) = [record.getMessage() for record in caplog.records]
        assert warning.startswith("2 columns `system`, which are left out")
    caplog.clear()
    read_prompts(file)
    assert "2 columns `system`" in caplog.text


BAD_LINES = {
    "": "the line is empty",
    '{"conversations": [': "Expecting value",
    "[]": "expected an object, got list",
    '{"text": "Hi"}': "got the columns ['text']",
    '{"messages": []}': "expected a non-empty list",
    '{"messages": ["Hi"]}': "role and content, got str",
    '{"messages": [{"role": "narrator", "content": "Hi"}]}': "unknown role 'narrator'; known roles: human",
    '{"messages": [{"role": "user", "content": null}]}': "content of a turn of user is NoneType",
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.items())
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path / "a.jsonl", [sharegpt("Hi", "Yo"), line, sharegpt("Hi", "Yo")])
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


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_blank_lines_at_the_end_are_no_lines(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.{suffix}"
    file.write_text('{"a": 1}\n\n{"a": 2}\n\n \n')
    (_, one), (place, error), (_, two) = read_records(file)
    assert (one, two) == ({"a": 1}, {"a": 2})
    assert (place, str(error)) == (f"{file}, line 2", "the line is empty")


def test_a_torn_file_is_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    data = gzip.compress((json.dumps(sharegpt("Hi", "Yo")) + "\n").encode())
    file.write_bytes(data + data[:-9])
    with pytest.raises(BadLineError, match="line 3: the rest of the file"):
        load_conversations([str(file)])
    assert len(load_conversations([str(file)], skip_bad_lines=True)) == 2


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    write(file, [sharegpt("Hi", "Yo")])
    assert to_messages(load_conversations([str(file)]))[0][0]["content"] == "Hi"
    changed = file.stat().st_mtime_ns
    write(file, [sharegpt("Ha", "Yo")])
    os.utime(file, ns=(changed + 1, changed + 1))
    assert to_messages(load_conversations([str(file)]))[0][0]["content"] == "Ha"


def test_what_is_read_and_tokenized_is_cached(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.jsonl", [sharegpt("Hi", "Yo")])
    rows = tokenize_conversations(load_conversations([file]), tokenizer, max_length=64)
    fail = pytest.fail  # neither reads nor tokenizes a second time
    monkeypatch.setattr("draftsmith.training.data.conversations.read_records", lambda path: fail("read again"))
    again = AutoTokenizer.from_pretrained(CHAT_TARGET)
    monkeypatch.setattr("draftsmith.training.data.chat_tokens._tokenize", lambda *_, **__: fail("tokenized again"))
    assert tokenize_conversations(load_conversations([file]), again, max_length=64).to_dict() == rows.to_dict()


def test_missing_and_empty_places_are_named(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nowhere"), "nowhere.jsonl", "./nowhere"):
        with pytest.raises(ValueError, match=r"nowhere.* does not exist"):
            load_conversations([path])
    for path in ("", " ", ":subset"):
        with pytest.raises(ValueError, match="which names nothing"):
            load_conversations([path])
    with pytest.raises(ValueError, match="https://hub/datasets/a does not exist"):
        load_conversations(["https://hub/datasets/a"])
    with pytest.raises(ValueError, match=r"no files ending in \.json,"):
        load_conversations([str(tmp_path)])
    for suffix, rows in ((".jsonl", []), (".jsonl.gz", []), (".json", ["[]"])):
        empty = write(tmp_path / f"a{suffix}", rows)
        with pytest.raises(BadLineError, match="line 1: the file is empty"):
            load_conversations([empty])
        with pytest.raises(ValueError, match="no conversations in"):
            load_conversations([empty], skip_bad_lines=True)


@pytest.mark.parametrize("name", ["a.md", "a.csv", "a.txt", "a.gz", "jsonl"])
def test_files_of_other_kinds_are_refused(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, [{"messages": TWO_TURNS}])
    with pytest.raises(ValueError, match=rf"^--prompts \S+{name} is a file whose name ends in none of \.json, "):
        Place.find(file, option="--prompts")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return str(path)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the hub has them, with two subsets, one of them with two splits: `datasets` reads both alike."""
    folder = tmp_path_factory.mktemp("repository")
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train-*}\n"
    card += "  - {split: test, path: main/test-*}\n- config_name: other\n  data_files: other/*\n---\n"
    (folder / "README.md").write_text(card)
    rows = [{"messages": TWO_TURNS, "conversations": None}, {"messages": None, "conversations": None}]
    write_parquet(folder / "main" / "train-00000.parquet", rows[:1] * 3)
    write_parquet(folder / "main" / "test-00000.parquet", rows[::-1])
    write_parquet(folder / "other" / "train-00000.parquet", [{"question": "1 + 1?", "answer": "#### 2"}])
    write(folder / "leftover.jsonl", ["not part of any subset"])
    return folder


def test_repositories_have_subsets_and_splits(repository: Path) -> None:
    name = f"{repository}:main"
    assert to_messages(load_conversations([name])) == [TWO_TURNS] * 3
    assert len(load_conversations([name], max_samples=2)) == 2
    (other,) = to_messages(load_conversations([f"{repository}:other"]))
    assert [message["content"] for message in other] == ["1 + 1?", "#### 2"]
    with pytest.raises(BadLineError, match=r":main \(test\), row 1: got the columns"):
        load_conversations([name], splits=["test"])
    for max_samples in (None, 1):  # bad rows do not count
        good = load_conversations([name], splits=["test"], skip_bad_lines=True, max_samples=max_samples)
        assert to_messages(good) == [TWO_TURNS]


def test_parquet_files_read_as_json_does(tmp_path: Path) -> None:
    """A table has every key in every row, null where there is none; nested ones are dropped."""
    calls = [{"type": "function", "function": {"name": "look", "arguments": json.dumps({"at": "x"})}}]
    rows = [
        {"messages": TWO_TURNS},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        {"messages": [TWO_TURNS[0], {"role": "assistant", "content": None, "tool_calls": calls}]},
    ]
    table = [{"messages": None, "conversations": None, **row} for row in rows]
    files = [write_parquet(tmp_path / "a.parquet", table), write(tmp_path / "b.jsonl", rows)]
    tables, lines = (load_conversations([file])["conversation"][:] for file in files)
    assert tables == lines
    assert json.loads(tables[2])["messages"][1] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert load_conversations([str(tmp_path)])["conversation"][:] == [*tables, *lines]


@pytest.mark.parametrize("cut", [40, -30])
def test_a_damaged_parquet_file_is_named(tmp_path: Path, cut: int) -> None:
    file = Path(write_parquet(tmp_path / "a.parquet", [{"messages": TWO_TURNS}] * 5))
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(BadLineError, match=r"a\.parquet, line 1: the rest of the file"):
        load_conversations([str(file)])
    (tmp_path / "set" / "data").mkdir(parents=True)
    file.rename(tmp_path / "set" / "data" / "train-0.parquet")
    with pytest.raises(ValueError, match=r"set \(train\) cannot be read: "):
        load_conversations([str(tmp_path / "set")])


def test_half_a_surrogate_pair_is_a_bad_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [sharegpt("Hi", "\ud83d"), sharegpt("Hi", "\ud83d\ude42")])
    with pytest.raises(BadLineError, match=r"line 1: .*surrogates not allowed"):
        load_conversations([file])
    assert to_messages(load_conversations([file], skip_bad_lines=True))[0][1]["content"] == "\U0001f642"


def test_readers_share_files(tmp_path: Path) -> None:
    """Each record is read once; files may hold one record."""
    for number in range(8):
        write(tmp_path / f"{number}.jsonl", [{"text": number}])
    place = Place.find(str(tmp_path))
    parts = [list(iterate_place(place, reader=reader, num_readers=4)) for reader in range(4)]
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert sorted(record["text"] for part in parts for _, record in part) == list(range(8))
