"""What a run sends to TensorBoard, wandb and MLflow, read back from their files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.training.runner import Runner, write_conversations

# transformers splits a name after "eval_", and calls the rest "train".
SENT = {"train/loss", "train/top1_depth1", "train/top1_depth2", "eval/loss", "eval/top1_depth2"}
SENT |= {"eval/acceptance_length"}


@pytest.fixture(scope="module")
def finished(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("tracked")
    runner = Runner(target_path, write_conversations(folder / "conversations.jsonl"), folder / "heads")
    trackers = ["tensorboard", *(name for name in ("wandb", "mlflow") if find_spec(name))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(folder))
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
        patch.setenv("MLFLOW_TRACKING_URI", (folder / "mlflow").as_uri())
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer releases keep it in maintenance only
        runner(report_to=trackers, report=True, eval_strategy="steps", eval_steps=4, max_steps=4)
        if "wandb" in trackers:
            import wandb

            wandb.finish()
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


def test_wandb_has_losses_acceptance_and_examples(finished: Runner) -> None:
    pytest.importorskip("wandb", reason="needs the `wandb` extra")
    (file,) = finished.output_dir.parent.glob("wandb/offline-run-*/run-*.wandb")
    history = read_history(file)
    assert history.keys() >= SENT
    metrics = json.loads((finished.output_dir / "training_record.json").read_text())["metrics"]
    assert history["eval/acceptance_length"] == [pytest.approx(metrics["eval_acceptance_length"])]
    assert len(history["train/loss"]) == 4
    assert all(map(math.isfinite, history["train/loss"]))
    table = json.loads((file.parent / "files" / history["examples/path"][0]).read_text())
    assert table["columns"] == ["prompt", "reply", "acceptance length"]
    assert len(table["data"]) == 2
    assert all("<|user|>" in prompt and reply and length >= 1 for prompt, reply, length in table["data"])


def test_mlflow_has_losses_and_acceptance(finished: Runner) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the `mlflow` extra")
    client = mlflow.MlflowClient((finished.output_dir.parent / "mlflow").as_uri())
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert run.data.metrics.keys() >= {name.replace("/", "_").removeprefix("train_") for name in SENT}
    (measured,) = client.get_metric_history(run.info.run_id, "eval_acceptance_length")
    metrics = json.loads((finished.output_dir / "training_record.json").read_text())["metrics"]
    assert measured.step == 4
    assert measured.value == pytest.approx(metrics["eval_acceptance_length"])


def read_history(file: Path) -> dict[str, list[Any]]:
    """The values of an offline run by name, in their order."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, list[Any]] = {}
    for data in read_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        for item in record.history.item:
            found.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    return found


def read_records(content: bytes) -> Iterator[bytes]:
    """LevelDB's log format: blocks of 32 KiB with parts of records, each after its checksum, length and kind."""
    place, record = 7, b""  # after the file's own header
    while place < len(content):
        if (left := -place % 2**15) and left < 7:  # the rest of a block
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""
