"""`--dry_run`: real steps on the longest rows, and nothing is left behind."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

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
        {"on_policy_fraction": 0.5, "on_policy_max_new_tokens": 40},
        {"eval_strategy": "steps", "eval_steps": 4, "early_stopping_patience": 2, "save_strategy": "best"},
    ],
    ids=["stream", "on-policy", "early stopping"],
)
def test_runs_of_other_kinds(train: Runner, options: dict[str, Any]) -> None:
    assert try_out(train, **options).num_steps == 8
