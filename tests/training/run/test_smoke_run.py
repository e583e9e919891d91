"""`--dry_run`: real steps on the longest rows, and nothing is left behind."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.training import train_heads
from draftsmith.training.options.command_line import parse_arguments
from draftsmith.training.run.preparation import prepare_run
from draftsmith.training.run.smoke_run import NUM_STEPS, SmokeRun, smoke_run
from draftsmith.training.run.trainer import HeadsTrainer
from tests.training.runner import Runner


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which must be empty afterwards."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def try_out(train: Runner, **options: Any) -> SmokeRun:
    return smoke_run(prepare_run(*parse_arguments(train.arguments(dry_run=True, **options))))


def test_it_measures_the_longest_rows_and_leaves_nothing(
    train: Runner, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []
    compute_loss = HeadsTrainer.compute_loss

    def noted(self: HeadsTrainer, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        widths.append(inputs["input_ids"].shape[1])
        return compute_loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(HeadsTrainer, "compute_loss", noted)
    epochs = {"max_steps": -1, "num_train_epochs": 3, "gradient_accumulation_steps": 2}
    run = prepare_run(*parse_arguments(train.arguments(dry_run=True, **epochs)))
    lengths = sorted((len(ids) for ids in run.trainer.train_dataset["input_ids"]), reverse=True)
    found = smoke_run(run)
    assert found.row_lengths == lengths[:8]
    assert found.num_steps == 9  # 18 rows, 8 in a step
    assert max(widths) == -(-lengths[0] // 8) * 8, "padded to a multiple of 8"
    assert len(widths) == 2 * NUM_STEPS
    assert found.step_seconds > 0
    assert found.peak_bytes > 2**26
    assert found.checkpoint_bytes > sum(weight.nbytes for weight in run.trainer.heads.parameters())
    assert not train.output_dir.exists()
    assert not [*scratch.iterdir()]
    train.output_dir.mkdir()
    try_out(train)
    assert train.output_dir.exists(), "the user's own folder"


@pytest.mark.parametrize(
    "options",
    [
        {"streaming": True, "eval_strategy": "steps", "eval_steps": 4},
        {"eval_strategy": "steps", "eval_steps": 4, "early_stopping_patience": 2, "save_strategy": "best"},
    ],
    ids=["stream", "early stopping"],
)
def test_runs_of_other_kinds(train: Runner, options: dict[str, Any]) -> None:
    assert try_out(train, **options).num_steps == 8


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by PEFT
def test_steps_of_heads_and_adapters_train_both(train: Runner) -> None:
    pytest.importorskip("peft", reason="peft is an optional extra")
    run = prepare_run(*parse_arguments(train.arguments(dry_run=True, lora_r=2, heads_warmup_steps=6)))
    adapters: Any = run.trainer.joint.adapters  # type: ignore[attr-defined]
    before = [weight.detach().clone() for weight in adapters]
    smoke_run(run)
    assert not all(torch.equal(one, other) for one, other in zip(before, adapters, strict=True))


def test_a_hybrid_run_stores_no_features(train: Runner, tmp_path: Path) -> None:
    try_out(train, features=tmp_path / "deep" / "features", feature_mode="hybrid")
    assert not (tmp_path / "deep").exists()


class TestProgram:
    def run(self, train: Runner, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
        monkeypatch.setattr("sys.argv", ["train_heads.py", *train.arguments(dry_run=True, **options)])
        monkeypatch.setattr("sys.path", [*train_heads.sys.path])
        return train_heads.main()

    def test_it_prints_what_it_measured(
        self, train: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(train, monkeypatch) == 0
        output = capsys.readouterr().out
        for line in ("dry run passed", "seconds per step", "peak memory", "8 steps, at most", "without --dry_run"):
            assert line in output
