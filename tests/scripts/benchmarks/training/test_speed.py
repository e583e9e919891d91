"""speed.py at small sizes, and the plain implementation that it compares with."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from draftsmith.heads import HEAD_TYPES
from draftsmith.scripts.benchmarks.training import speed
from draftsmith.scripts.benchmarks.training.speed import (
    IMPLEMENTATIONS,
    OURS,
    PLAIN,
    Bench,
    Cell,
    TrainingSpeedArguments,
)
from tests.tiny_targets import tiny_target


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_target("llama").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", sorted(HEAD_TYPES))
def test_the_plain_implementation_has_the_same_loss_and_gradients(kind: str, target_path: str) -> None:
    """Over every kind: a slow reference of whole training steps, and a fair opponent."""
    bench = Bench(Cell(target_path, kind, 40, 2, "float32", "cpu"))
    bench.heads.eval()  # no noise, and no draws that padding would change
    rows = bench.make_rows(40)
    rows[1] = {name: values[:29] for name, values in rows[1].items()}
    results = []
    for implementation in IMPLEMENTATIONS:
        found: list[dict[str, torch.Tensor]] = []
        parameters = dict(bench.heads.named_parameters())
        bench.optimizer.register_step_pre_hook(
            lambda *_, found=found, parameters=parameters: found.append(
                {name: held.grad.clone() for name, held in parameters.items() if held.grad is not None}
            )
        )
        loss = bench.step(implementation, rows, lambda: 0.0).loss
        results.append((loss, found[0]))
    (expected_loss, expected), *others = results
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    for loss, gradients in others:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


def test_a_small_run(target_path: str, tmp_path: Path) -> None:
    args = TrainingSpeedArguments(
        target=target_path,
        lengths=[16, 32],
        kinds=["medusa"],
        plain_up_to=16,
        dtype="float32",
        repeats=2,
        device="cpu",
        output=str(tmp_path / "out"),
    )
    speed.run(args, Console(file=io.StringIO()))
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [cell["length"] for cell in cells] == [16, 32]
    assert all(cells[0][name]["total"] > 0 and len(cells[0][name]["parts"]) == 4 for name in IMPLEMENTATIONS)
    assert PLAIN not in cells[1]
    assert cells[1][OURS]["memory"] > cells[0][OURS]["memory"] > 0
    assert (tmp_path / "out.md").read_text().count("| medusa, 32 |") == 1


def test_epochs_on_stored_features(target_path: str, tmp_path: Path) -> None:
    args = TrainingSpeedArguments(
        target=target_path,
        lengths=[16],
        kinds=["medusa"],
        dtype="float32",
        repeats=1,
        device="cpu",
        offline=[1, 2],
        output=str(tmp_path / "out"),
    )
    speed.run(args, Console(file=io.StringIO()))
    rows = [line.split("|")[2:4] for line in (tmp_path / "out.md").read_text().splitlines() if "| medusa, 16" in line]
    assert len(rows) == 2
    assert all(0 < float(speed) < 1 for row in rows for speed in row)


def test_the_peak_holds_the_plain_attention(target_path: str) -> None:
    """The plain step's scores [H, T, K * T] have 4 * 200 * 1,400 numbers of 4 bytes."""
    bench = Bench(Cell(target_path, "eagle3", 200, 1, "float32", "cpu"))
    rows = bench.make_rows(200)
    peaks = [speed.measure_peak(bench, name, rows) for name in (OURS, PLAIN)]
    assert peaks[0] < peaks[1]
    assert peaks[1] > 4 * 200 * 1400 * 4


def test_a_folder_with_a_config_only_gets_random_weights(tmp_path: Path) -> None:
    tiny_target("llama").config.save_pretrained(tmp_path)
    model = speed.load_model(Cell(str(tmp_path), "medusa", 4096, 1, "float32", "cpu"), torch.device("cpu"))
    assert model.config.max_position_embeddings == 4096
