"""Files that outlive a kill at any byte, and files that appear at once."""

import gzip
import json
from pathlib import Path

import pytest

from draftsmith.training.synthesis.output import JsonLinesJournal, read_journal, read_lines, write_lines


def test_a_kill_at_any_byte_loses_no_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    journal = JsonLinesJournal(path)
    rows = [{"id": str(index), "text": "ü" * index} for index in range(3)]
    sizes = []
    for row in rows:
        journal.append([row])
        sizes.append(path.stat().st_size)
    journal.close()
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = rows[: sum(size >= end for end in sizes)]
        assert read_journal(path) == kept
        assert path.read_bytes() == whole[:size], "who only reads changes nothing"
        journal = JsonLinesJournal(path)
        journal.append([{"id": "next"}])
        journal.close()
        assert [json.loads(line) for line in path.read_bytes().splitlines()] == [*kept, {"id": "next"}]
    assert [place.name for place in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_files_appear_whole_or_not_at_all(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    rows = [{"id": str(index)} for index in range(3)]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    for _ in range(2):
        write_lines(path, lines)
        written = path.read_bytes()
        assert (gzip.decompress(written) if name.endswith(".gz") else written) == b"".join(lines)
        assert list(read_lines(path)) == rows
    with pytest.raises(TypeError):
        write_lines(path, [b"half", 3])
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
        read_journal(tmp_path / "out.jsonl")
