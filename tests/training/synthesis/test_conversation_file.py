"""Files that outlive a kill at any byte, and files that appear at once."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from draftsmith.training.synthesis.conversation_file import JsonLinesJournal, read_journal, read_lines, replacing


def reopened(path: Path) -> list[dict[str, str]]:
    journal = JsonLinesJournal(path)
    journal.close()
    return journal.rows


def test_a_kill_at_any_byte_loses_no_whole_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "out.jsonl"
    journal = JsonLinesJournal(path)
    assert journal.rows == []
    rows = [{"id": str(index), "text": "ü" * index} for index in range(3)]
    sizes = []
    for row in rows:
        journal.append([row])
        sizes.append(path.stat().st_size - 1)  # a line of which only the line break is missing is whole
    journal.close()
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        caplog.clear()
        kept = rows[: sum(size >= end for end in sizes)]
        assert read_journal(path) == kept
        assert path.read_bytes() == whole[:size], "who only reads changes nothing"
        journal = JsonLinesJournal(path)
        assert journal.rows == kept
        assert ("removed the last line" in caplog.text) == (size not in (0, *sizes, *(end + 1 for end in sizes)))
        journal.append([{"id": "next"}])
        journal.close()
        assert [json.loads(line) for line in path.read_bytes().splitlines()] == [*kept, {"id": "next"}]
    assert [place.name for place in tmp_path.iterdir()] == [path.name]


def test_one_process_at_a_time_appends(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = JsonLinesJournal(path)
    first.append([{"id": "1"}])
    with pytest.raises(ValueError, match="another process is writing"):
        JsonLinesJournal(path)
    assert read_journal(path) == [{"id": "1"}]
    first.close()
    assert reopened(path) == [{"id": "1"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fcntl", None)  # as on Windows
        assert reopened(path) == [{"id": "1"}]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_files_appear_whole_or_not_at_all(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    rows = [{"id": str(index)} for index in range(3)]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    for _ in range(2):
        with replacing(path) as file:
            file.writelines(lines)
        written = path.read_bytes()
        assert (gzip.decompress(written) if name.endswith(".gz") else written) == b"".join(lines)
        assert list(read_lines(path)) == rows
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half", 3])  # type: ignore[list-item]
    assert path.read_bytes() == written
    assert [place.name for place in tmp_path.iterdir()] == [name]


def test_files_that_are_something_else_are_left_alone(tmp_path: Path) -> None:
    for name, message in (("out.jsonl", "line 1 is not JSON"), ("out.jsonl.gz", "Not a gzipped file")):
        path = tmp_path / name
        path.write_text("Dear diary\n{}\n")
        with pytest.raises(ValueError, match=message):
            list(read_lines(path))
        assert path.read_text() == "Dear diary\n{}\n"
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        JsonLinesJournal(tmp_path / "out.jsonl")
    assert reopened(tmp_path / "other.jsonl") == [], "the lock of a file that was refused is free again"
