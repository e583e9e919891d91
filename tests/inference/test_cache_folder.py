"""Where compiled kernels are kept."""

import os
from pathlib import Path

import pytest
from torch._inductor.runtime.runtime_utils import default_cache_dir

from draftsmith.inference.cache_folder import keep_compiled_kernels

NAME = "TORCHINDUCTOR_CACHE_DIR"


@pytest.mark.parametrize("earlier", [None, "torch's default"])
def test_kernels_outlive_the_temporary_folder(
    earlier: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Importing torch's compiler sets the variable, so it is seldom unset."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setenv(NAME, default_cache_dir())
    if earlier is None:
        monkeypatch.delenv(NAME)
    keep_compiled_kernels()
    assert os.environ[NAME] == str(tmp_path / "draftsmith" / "kernels")


def test_the_users_folder_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setenv(NAME, str(tmp_path / "own"))
    keep_compiled_kernels()
    assert os.environ[NAME] == str(tmp_path / "own")
