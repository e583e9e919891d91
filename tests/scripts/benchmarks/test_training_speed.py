"""training_speed.py at small sizes, and the plain implementation that it compares with."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from heads import HEAD_TYPES
from scripts.benchmarks import training_cells, training_speed
from scripts.benchmarks.training_cells import OURS, PLAIN, PLAIN_SDPA, Bench, Cell, Timing
from scripts.benchmarks.training_speed import Line, TrainingBenchmarkArguments, fit_exponent
from tests.tiny_targets import tiny_target


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_target("llama").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", sorted(HEAD_TYPES))
def test_the_plain_implementation_has_the_same_loss_and_gradients(kind: str, target_path: str) -> None:
    """Over every kind: it is a slow reference of whole training steps, and a fair opponent."""
    bench = Bench(Cell(target_path, kind, 40, 2, "float32", "cpu"))
    bench.heads.eval()  # no noise, and no draws that padding would change
    rows = bench.make_rows(40)
    rows[1] = {name: values[:29] for name, values in rows[1].items()}
    results = []
    for implementation in (OURS, PLAIN, PLAIN_SDPA):
        found: list[dict[str, torch.Tensor]] = []
        parameters = dict(bench.heads.named_parameters())
        bench.optimizer.register_step_pre_hook(
            lambda *_, found=found, parameters=parameters: found.append(
                {name: parameter.grad.clone() for name, parameter in parameters.items()}
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


def test_a_small_run(target_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_speed, "measure_memory", lambda cell, _: cell.length << 20)
    files: dict[str, Any] = {name: str(tmp_path / f"out.{name}") for name in ("json", "markdown", "plot")}
    args = TrainingBenchmarkArguments(
        targets=[target_path],
        lengths=[16, 32],
        kinds=["medusa"],
        kinds_length=16,
        plain_up_to=16,
        dtypes=["float32"],
        repeats=2,
        device="cpu",
        peak_tflops=1.0,
        **files,
    )
    text = training_speed.run(args, Console(file=io.StringIO()))
    assert Path(files["markdown"]).read_text() == text
    assert Path(files["plot"]).stat().st_size > 1000
    content = json.loads(Path(files["json"]).read_text())
    measured = [(cell["cell"]["kind"], cell["cell"]["length"], cell["implementation"]) for cell in content["cells"]]
    assert measured == [
        *(("eagle3", 16, name) for name in (OURS, PLAIN, PLAIN_SDPA)),
        ("eagle3", 32, OURS),
        *(("medusa", 16, name) for name in (OURS, PLAIN, PLAIN_SDPA)),
    ]
    assert all(cell["total"] > 0 and len(cell["parts"]) == 4 and cell["flops"] > 0 for cell in content["cells"])
    assert text.count("| eagle3, 32 |") == 1


@pytest.mark.slow
def test_memory_of_a_process_of_its_own_grows_with_the_rows(target_path: str) -> None:
    """The plain step's [H, T, K * T] alone are 4 * 600 * 4,200 numbers of 4 bytes."""
    cell = Cell(target_path, "eagle3", 600, 1, "float32", "cpu")
    assert training_cells.measure_memory(cell, PLAIN) > 4 * 600 * 4200 * 4


def test_the_exponent_of_a_power_is_found() -> None:
    lines = [
        Line(Timing(Cell("t", "eagle3", length, 1, "float32", "cpu"), OURS, [1.0], 1.0, 0.0, 0.0, 1), 3 * length**2)
        for length in (512, 2048, 4096, 8192)
    ]
    assert fit_exponent(lines) == pytest.approx(2.0)
    assert fit_exponent(lines[:2]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "got --repeats 0: give at least 1"),
        ({"kinds": ["eagle4"]}, "got --kinds eagle4; there are block, "),
        ({"dtypes": ["float16"]}, "got --dtypes float16"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingBenchmarkArguments(**options)
