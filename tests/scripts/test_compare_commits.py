"""Two commits' benchmarks beside each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import compare_commits

FAKE = """
import json, sys
path = sys.argv[sys.argv.index("--json") + 1]
row = {"name": "heads", "tree": "chain", "problem": "", "tokens_per_second": SPEED, "acceptance_length": 2.0}
row["step_milliseconds"] = {"draft": 1.0, "verify": SPEED / 100, "accept": 0.1, "commit": 0.1}
failed = {"name": "other", "tree": "", "problem": "too deep", "tokens_per_second": 0}
json.dump({"reports": [{"rows": [row, failed]}]}, open(path, "w"))
"""


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A repository whose benchmark.py measures 100 tokens a second at first, then 200."""

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", *identity, "-C", str(tmp_path), *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "scripts").mkdir()
    hashes = []
    for speed in (100, 200):
        (tmp_path / "scripts" / "benchmark.py").write_text(FAKE.replace("SPEED", str(speed)))
        git("add", "-A")
        git("commit", "-qm", "change")
        hashes.append(git("rev-parse", "--short", "HEAD"))
    monkeypatch.setattr(compare_commits, "ROOT", tmp_path)
    return hashes


def test_a_line_for_each_commit(commits: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "table.md"
    words = [*commits, "--repeats", "2", "--markdown", str(output), "--", "--tree", "chain"]
    assert compare_commits.main(words) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[2:] == [
        f"| heads chain | {commits[0]} | 100 (100–100) | 2.00 | 1.00 | 1.00 | 0.10 | 0.10 |",
        f"| heads chain | {commits[1]} | 200 (200–200) | 2.00 | 1.00 | 2.00 | 0.10 | 0.10 |",
    ]
    assert f"compare_commits.py {commits[0]}" in output.read_text()
    listed = subprocess.run(
        ["git", "-C", str(tmp_path), "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1, "nothing is left behind"


def test_files_are_those_of_the_working_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    words: object = compare_commits.absolute_paths(["--heads", "mine", "a/hub-id", "--tree", "mine"])
    assert words == ["--heads", str(tmp_path / "mine"), "a/hub-id", "--tree", "mine"]
    (words,) = compare_commits.absolute_paths(["--heads", "examples/heads/medusa"])[1:]
    assert words == str(REPOSITORY / "examples" / "heads" / "medusa"), "started elsewhere"
    for option in ("--heads=mine", "--json"):
        with pytest.raises(ValueError, match="write options and values apart"):
            compare_commits.absolute_paths([option, "mine"])


@pytest.mark.parametrize(
    "words", [["one", "--", "--tree", "x"], ["one", "two"], ["one", "two", "--repeats", "0", "--", "x"]]
)
def test_what_cannot_be_compared_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_commits.main(words)
    assert "give two commits or more" in capsys.readouterr().err


def test_an_unknown_commit_is_named(commits: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"compare_commits.py: .*fatal"):
        compare_commits.main([commits[0], "no-such-commit", "--", "--tree", "chain"])
