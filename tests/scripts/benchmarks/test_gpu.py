"""gpu.py, rehearsed on the CPU: its parts, their time, and the record that they share."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from draftsmith.scripts.benchmarks import gpu
from draftsmith.scripts.benchmarks.gpu_parts import PARTS, Cases, Measure, Setup, run_selection
from tests.conftest import REPOSITORY

REHEARSAL = Namespace(device="cpu", tiny=True)


def link_libraries(folder: Path, *names: str, without: frozenset[str]) -> None:
    """Puts these libraries, and those that they require, into a folder."""
    left, seen = list(names), set(without)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        needed = map(Requirement, found.requires or ())
        left += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))).resolve())


@pytest.mark.ci
@pytest.mark.slow
def test_a_rehearsal_with_four_libraries(tmp_path: Path) -> None:
    """In an environment that has nothing but torch, transformers, safetensors, tokenizers and what they need."""
    libraries, record = tmp_path / "libraries", tmp_path / "gpu.json"
    libraries.mkdir()
    without = frozenset(("rich", "typer"))
    link_libraries(libraries, "torch", "transformers", "safetensors", "tokenizers", without=without)
    words = ["scripts/benchmarks/gpu.py", "--device", "cpu", "--tiny", "--minutes", "6", "--output", str(record)]
    parts = [part for part in PARTS if part not in ("1B", "tests", "compiled")]
    # Threads that wait for each other take long beside other tests.
    environment = {**os.environ, "PYTHONPATH": str(libraries), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-S", *words, "--parts", *parts],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    found = json.loads(record.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(found) == parts
    assert all(part["state"] in ("done", "cut off") for part in found.values()), "cut off: on a slow machine"
    assert not [line for part in found.values() for line in part["lines"].values() if "failed" in line]
    rounds = found["8B"]["lines"]["eagle3, chain:3, eager, 1 x 512"]
    assert {"step ms", "verify ms", "of the roofline", "tokens/s at 4", "x plain at 4"} <= set(rounds)
    assert all(line["MFU"] > 0 for line in found["training"]["lines"].values())
    texts = found["models"]["lines"]
    assert all(line["same texts"] == line["texts"] for label, line in texts.items() if "float32" in label)
    assert all(line["same texts"] + line["near-ties"] == line["texts"] for line in texts.values()), "T = 0 and 1"
    assert {"training", "8B"} < {line.removeprefix("## ") for line in record.with_suffix(".md").read_text().split("\n")}


def raise_error(setup: Setup) -> Cases:
    yield "first", lambda: {"us": 1.0}
    raise KeyError("second")


def end_the_process(setup: Setup) -> Cases:
    yield "first", lambda: os._exit(3)


def run_no_tests(setup: Setup) -> Cases:
    yield "first", lambda: run_selection(["--no-such-option"], setup)
    yield "second", lambda: {"us": 1.0}


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (raise_error, "failed: KeyError: 'second'"),
        (end_the_process, "failed: its process ended with status 3"),
        (run_no_tests, "failed: first: .*unrecognized arguments: --no-such-option.*"),
    ],
)
def test_a_part_that_fails_is_recorded_with_its_reason(
    part: Measure, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "tests", (60.0, part))
    args = Namespace(**vars(REHEARSAL), parts=["tests", "attention"], minutes=5.0, output=str(tmp_path / "gpu.json"))
    assert gpu.run(args) == 1
    states = {name: found["state"] for name, found in json.loads(Path(args.output).read_text()).items()}
    assert re.fullmatch(reason, states["tests"])
    assert states["attention"] == "done"
    assert f"not done: tests ({states['tests']})" in capsys.readouterr().out


def test_a_run_replaces_its_own_parts(tmp_path: Path) -> None:
    args = Namespace(**vars(REHEARSAL), parts=["attention"], minutes=5.0, output=str(tmp_path / "gpu.json"))
    about = {
        "card": "another",
        "torch": "2",
        "commit": "0",
        "date": "then",
        "seconds": 1.0,
        "state": "done",
        "lines": {},
    }
    Path(args.output).write_text(json.dumps({"training": about, "attention": about}))
    assert gpu.run(args) == 0
    found = json.loads(Path(args.output).read_text())
    assert list(found) == ["attention", "training"], "in their order"
    assert found["training"] == about
    assert found["attention"]["card"].startswith("a rehearsal")
    assert found["attention"]["lines"]["4 nodes after 64"]["sdpa us"] > 0
    assert found["attention"]["lines"]["product of 16 rows"]["torch us"] > 0
