"""`make gpu`, rehearsed on the CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from draftsmith.scripts.benchmarks import gpu
from draftsmith.scripts.benchmarks.gpu import GpuArguments, Part, find_utilisation, make_parts


@pytest.mark.slow
def test_a_rehearsal(tmp_path: Path) -> None:
    """All parts run, in processes of their own, and one page has their results."""
    args = GpuArguments("cpu", tiny=True, peak_tflops=1.0, output=str(tmp_path / "page"))
    assert gpu.run(args, tmp_path) == 0, (tmp_path / "page.md").read_text()
    page, content = (tmp_path / "page.md").read_text(), json.loads((tmp_path / "page.json").read_text())
    for title in ("tests", "chat-13m", "sizes", "training-tiny"):
        assert f"| {title} | passed |" in page
        assert f"## {title}\n" in page
    assert "a rehearsal" in page
    assert "MFU" in page
    assert content["sizes"]["environment"]["simulated"]
    assert content["training-tiny"]["cells"][0]["ours"]["total"] > 0
    assert content["mfu"]["training-tiny"].keys() == {"eagle3", "mtp", "block"}


def test_a_part_that_fails_is_reported(tmp_path: Path) -> None:
    part = Part("sum", ["-c", "print('so far'); raise SystemExit(3)"], tmp_path)
    (tmp_path / "sum.md").write_text("of an earlier run")
    part.run()
    assert (part.returncode, part.tail) == (3, "so far")
    assert part.read("md") == ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the worker in /proc")
def test_a_part_that_takes_too_long_ends_with_its_own_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TIMEOUT", 5)
    program = f"""import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "number")!r}, "w").write(str(worker.pid))
time.sleep(60)"""
    part = Part("sleep", ["-c", program], tmp_path)
    part.run()
    assert part.tail == "not done after 5 seconds"
    status = Path(f"/proc/{(tmp_path / 'number').read_text()}/status")
    deadline = time.monotonic() + 20
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.1)


def test_the_parts_of_a_real_run(tmp_path: Path) -> None:
    tests, chat, sizes, *training = make_parts(GpuArguments("cuda"), tmp_path)
    assert tests.words[1:5] == ["pytest", "tests", "-m", "gpu"]
    assert {"1B", "8B", "compiled"} <= set(sizes.words)
    assert all("cuda" in part.words for part in (chat, sizes, *training))
    sizes_of = {part.title: json.loads((Path(part.words[2]) / "config.json").read_text()) for part in training}
    assert {title: config["hidden_size"] for title, config in sizes_of.items()} == {
        "training-1B": 2048,
        "training-8B": 4096,
    }


def test_the_utilisation_is_operations_over_time_and_peak() -> None:
    cells = [{"kind": kind, "ours": {"total": 0.5, "operations": 989 * 10**9}} for kind in ("eagle3", "mtp")]
    found = find_utilisation({"cells": cells}, GpuArguments(tiny=True), "NVIDIA H100 80GB HBM3")
    assert found == {"eagle3": pytest.approx(0.002), "mtp": pytest.approx(0.002)}
    assert find_utilisation({"cells": cells}, GpuArguments(tiny=True), "a card of tomorrow") == {}
