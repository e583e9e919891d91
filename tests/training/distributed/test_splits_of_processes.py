"""The loss and the gradient of an optimizer step of two processes equal those of one big batch, for every kind."""

import os
from pathlib import Path

import pytest
import torch

from draftsmith.inference import Target
from tests.processes import end_ranks, start_ranks
from tests.tiny_targets import tiny_target
from tests.training.run.test_splits import CASES, QUICK, ROWS, Result, assert_same_step, pack, train

PACKED = [pack(ROWS[:3]), pack(ROWS[3:])]


def run_all(folder: Path, num_processes: int) -> dict[str, Result]:
    """One step of all cases, and of some with packed rows."""
    target, found = Target(tiny_target("llama").requires_grad_(False)), {}
    for name in CASES:
        found[name] = train(target, name, ROWS, len(ROWS) // num_processes, 1, folder)
        if name in QUICK:
            found[f"{name}, packed"] = train(target, name, PACKED, len(PACKED) // num_processes, 1, folder)
    return found


@pytest.mark.slow
@pytest.mark.ci
def test_equals_one_big_batch(tmp_path: Path) -> None:
    ended = end_ranks(start_ranks(2, tmp_path / "rank", save_results, tmp_path))
    assert ended == [0, 0], (tmp_path / "rank0").read_text()
    found = torch.load(tmp_path / "results.pt", weights_only=True)
    for name, expected in run_all(tmp_path, 1).items():
        assert_same_step(Result(*found[name]), expected, name)


def save_results(folder: Path) -> None:
    results = run_all(folder, 2)
    if os.environ["RANK"] == "0":
        torch.save({name: tuple(result) for name, result in results.items()}, folder / "results.pt")
