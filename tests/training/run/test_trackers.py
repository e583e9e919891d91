"""What a run sends to TensorBoard, read back from its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.runner import Runner, write_conversations

# transformers splits a name after "eval_", and calls the rest "train".
SENT = {"train/loss", "train/top1_depth1", "train/top1_depth2", "eval/loss", "eval/top1_depth2"}
SENT |= {"eval/acceptance_length"}


@pytest.fixture(scope="module")
def finished(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("tracked")
    runner = Runner(target_path, write_conversations(folder / "conversations.jsonl"), folder / "heads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
        runner(report_to=["tensorboard"], eval_strategy="steps", eval_steps=4, max_steps=4)
    return runner


def test_tensorboard_has_losses_and_acceptance(finished: Runner) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = finished.output_dir.parent / "events"
    events = EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()["scalars"]) >= SENT
    (measured,) = events.Scalars("eval/acceptance_length")
    metrics = json.loads((finished.output_dir / "training_record.json").read_text())["metrics"]
    assert measured.step == 4
    assert measured.value == pytest.approx(metrics["eval_acceptance_length"])
