"""`import draftsmith`, from a checkout, an installed wheel, and beside a user's own folders."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import draftsmith
from draftsmith import heads, inference
from tests.conftest import REPOSITORY
from tests.test_readme import README, blocks, with_models_at_hand

FOLDERS = ("heads", "inference", "scripts", "training")


def run(*words: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python with `path` in front of everything that is installed."""
    environment = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_it_has_the_public_names_of_its_packages() -> None:
    assert sorted(draftsmith.__all__) == sorted([*heads.__all__, *inference.__all__, "OnlineLearner"])
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


def test_folders_of_a_user_do_not_matter(tmp_path: Path) -> None:
    """Empty ones, and packages; nor do they to the processes that a program starts."""
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    (tmp_path / "heads" / "__init__.py").write_text("raise AssertionError\n")
    (tmp_path / "mine.py").write_text(
        "import multiprocessing\n"
        "from draftsmith import chain\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(chain, (3,)).num_nodes)\n"
    )
    done = run("mine.py", cwd=tmp_path, path=REPOSITORY / "src")
    assert done.stdout == "4\n", done.stderr


@pytest.mark.parametrize(("program", "flags"), [("scripts/cli.py", []), ("training/train_heads.py", ["-P"])])
def test_programs_run_by_their_path(program: str, flags: list[str], tmp_path: Path) -> None:
    """The checkout's own package wins over an installed one; -P leaves the program's folder off the path."""
    done = run(*flags, str(REPOSITORY / program), "--help", cwd=tmp_path)
    assert done.stdout.startswith("usage:"), done.stderr


def test_a_checkout_without_links(tmp_path: Path) -> None:
    """As git makes it on Windows: a link is a small file with the name of its target."""
    package = tmp_path / "src" / "draftsmith"
    package.mkdir(parents=True)
    shutil.copy(REPOSITORY / "src" / "draftsmith" / "__init__.py", package)
    for name in FOLDERS:
        (tmp_path / name).symlink_to(REPOSITORY / name)
        (package / name).write_text(f"../../{name}")
    code = "import draftsmith.scripts.cli, importlib.util as find; print(draftsmith.__file__)\n"
    code += f"for name in {FOLDERS}: print(find.find_spec('draftsmith.' + name).origin)"  # an import would take seconds
    done = run("-c", code, cwd=tmp_path, path=tmp_path / "src")
    places = [package, *(REPOSITORY / name for name in FOLDERS)]
    assert [Path(line).resolve() for line in done.stdout.split()] == [place / "__init__.py" for place in places], done


@pytest.mark.slow
@pytest.mark.ci
def test_a_release_runs_in_a_fresh_environment(tmp_path: Path) -> None:
    """A wheel made from the sdist has every file. Installed, it runs the README's block and the console command."""
    checkout = tmp_path / "checkout"  # a build leaves files behind
    for name in (*FOLDERS, "src"):
        shutil.copytree(REPOSITORY / name, checkout / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, checkout)
    done = run("-c", f"import setuptools.build_meta as b; b.build_sdist({str(tmp_path)!r})", cwd=checkout)
    assert done.returncode == 0, done.stderr
    (sdist,) = tmp_path.glob("draftsmith-*.tar.gz")
    done = run("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", str(sdist), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("draftsmith-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = {
        f"draftsmith/{file.relative_to(REPOSITORY)}"
        for name in FOLDERS
        for file in (REPOSITORY / name).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert not ours - names
    assert not [name for name in names if name.split("/")[0] not in ("draftsmith",) and ".dist-info/" not in name]

    place = tmp_path / "fresh"
    venv.create(place, symlinks=True)
    (site,) = place.glob("lib/python*/site-packages")
    others = Path(pytest.__file__).parents[1]  # .pth files there, as of an editable install, do not count
    (site / "others.pth").write_text(str(others))
    install = ("--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel))
    done = run("-m", "pip", "--python", str(place / "bin" / "python"), "install", *install, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("examples", "outputs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    code = with_models_at_hand(blocks(README, "python")[0])
    code += "\nimport draftsmith; print(draftsmith.__file__, draftsmith.__version__)"
    words = [[str(place / "bin" / "python"), "-c", code], [str(place / "bin" / "draftsmith"), "chat", "--help"]]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python, command = (
        subprocess.run(one, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False) for one in words
    )
    version = wheel.name.split("-")[1]
    expected = f" tokens per forward pass\n{site / 'draftsmith' / '__init__.py'} {version}\n"
    assert python.stdout.endswith(expected), python.stderr
    assert command.stdout.startswith("usage: draftsmith chat"), command.stderr
