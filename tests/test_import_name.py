"""`import draftsmith`, from a checkout, an installed wheel, and beside a user's own folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import draftsmith
from draftsmith import heads, inference
from tests.conftest import REPOSITORY

FOLDERS = ("heads", "inference", "scripts", "training")


def run(*words: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python with `path` in front of everything that is installed."""
    environment = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_it_has_the_public_names_of_its_packages() -> None:
    assert sorted(draftsmith.__all__) == sorted([*heads.__all__, *inference.__all__])
    assert draftsmith.generate is inference.generate
    assert draftsmith.DraftHeads is heads.DraftHeads
    assert {"generate", "HEAD_TYPES", "__version__"} <= set(dir(draftsmith))
    assert draftsmith.__version__
    with pytest.raises(AttributeError, match="Generate"):
        draftsmith.Generate  # noqa: B018


def test_a_second_copy_of_the_classes_is_refused() -> None:
    """Python puts the current folder on its path, and so the top-level folders of a checkout."""
    for name in ("heads", "inference", "training"):
        done = run("-c", f"import {name}", cwd=REPOSITORY)
        assert f"import draftsmith.{name}, not {name}" in done.stderr


def test_a_checkout_without_links(tmp_path: Path) -> None:
    """As git makes it on Windows: a link is a small file with the name of its target."""
    package = tmp_path / "src" / "draftsmith"
    package.mkdir(parents=True)
    shutil.copy(REPOSITORY / "src" / "draftsmith" / "__init__.py", package)
    for name in FOLDERS:
        (tmp_path / name).symlink_to(REPOSITORY / name)
        (package / name).write_text(f"../../{name}")
    code = "import draftsmith.scripts.cli, draftsmith; print(draftsmith.chain(2).num_nodes, draftsmith.__file__)"
    done = run("-c", code, cwd=tmp_path, path=tmp_path / "src")
    assert done.stdout == f"3 {package / '__init__.py'}\n", done.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_a_wheel_has_every_file(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"  # a build leaves files behind
    for name in (*FOLDERS, "src"):
        shutil.copytree(REPOSITORY / name, checkout / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, checkout)
    done = run("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "./checkout", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("draftsmith-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    ours = {
        f"draftsmith/{file.relative_to(REPOSITORY)}"
        for name in FOLDERS
        for file in (REPOSITORY / name).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert not ours - names
    assert not [name for name in names if name.split("/")[0] not in ("draftsmith",) and ".dist-info/" not in name]
    code = "import draftsmith; print(draftsmith.__file__); draftsmith.generate"
    done = run("-c", code, cwd=tmp_path, path=tmp_path / "site")
    assert done.stdout == f"{tmp_path / 'site' / 'draftsmith' / '__init__.py'}\n", done.stderr
