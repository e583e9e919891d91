"""What is written beside measured numbers."""

import subprocess
from pathlib import Path

from draftsmith.scripts.measuring.environment import read_commit


def test_the_commit_is_that_of_the_folder_itself(tmp_path: Path) -> None:
    """A + says that tracked files have changed; a folder inside another project's repository has no commit."""

    def git(*words: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "installed").mkdir()
    (tmp_path / "file").write_text("a")
    git("init")
    git("add", "file")
    git("commit", "--no-gpg-sign", "-m", "a")
    commit = git("rev-parse", "HEAD")[:12]
    assert read_commit(tmp_path) == commit
    assert read_commit(tmp_path / "installed") is None
    (tmp_path / "file").write_text("b")
    assert read_commit(tmp_path) == f"{commit}+"
