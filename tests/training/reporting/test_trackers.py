"""What a run sends to trackers: transformers sends the metrics to all of them alike, and we send examples to wandb."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftsmith.training.reporting.examples import Example, Piece, send_examples
from tests.training.runner import Runner

# transformers splits a name after "eval_", and calls the rest "train".
SENT = {"train/loss", "train/top1_depth1", "train/top1_depth2", "eval/loss", "eval/top1_depth2"}
SENT |= {"eval/acceptance_length"}


def test_tensorboard_has_losses_and_acceptance(train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    train(report_to="tensorboard", eval_strategy="steps", eval_steps=2, max_steps=2)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert set(events.Tags()["scalars"]) >= SENT
    (measured,) = events.Scalars("eval/acceptance_length")
    metrics = json.loads((train.output_dir / "training_record.json").read_text())["metrics"]
    assert measured.step == 2
    assert measured.value == pytest.approx(metrics["eval_acceptance_length"])


def test_wandb_gets_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    wandb = SimpleNamespace(run=object(), log=sent.append, Table=lambda **table: table)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    examples = [Example("<|user|> Hi", [Piece("Hel", True), Piece("lo", False)], 1.5)]
    send_examples(examples, ["tensorboard", "wandb"])
    columns = ["prompt", "reply", "acceptance length"]
    assert sent == [{"examples": {"columns": columns, "data": [["<|user|> Hi", "Hello", 1.5]]}}]
    send_examples(examples, ["tensorboard"])
    monkeypatch.setattr(wandb, "run", None)  # in the other processes
    send_examples(examples, ["wandb"])
    assert len(sent) == 1
