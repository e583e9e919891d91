"""examples/smollm2-135m/train_on_gpu.sh, rehearsed on a CPU with chat-13m and two steps of each kind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.heads import DraftHeads
from tests.conftest import CHAT_TARGET, REPOSITORY

FEW = "--per_device_train_batch_size 1 --max_length 64 --num_eval_prompts 1 --eval_max_new_tokens 4 --save_steps 1"


def start(output: Path, minutes: int = 8) -> subprocess.Popen[str]:
    about = {"TARGET": CHAT_TARGET, "HEADS": "examples/heads/", "PROMPTS": "examples/prompts.jsonl", "OUTPUT": output}
    sizes = {"CONVERSATIONS": 4, "BATCH": 4, "STEPS": 2, "MINUTES": minutes, "OMP_NUM_THREADS": 1}
    words = {**about, **sizes, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [REPOSITORY / "examples" / "smollm2-135m" / "train_on_gpu.sh", *FEW.split()],
        env={**os.environ, **{name: str(value) for name, value in words.items()}},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def test_no_time_is_left(tmp_path: Path) -> None:
    process = start(tmp_path, minutes=0)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (124, "the time is over: the same command goes on\n")


@pytest.mark.slow
def test_the_second_call_continues_where_the_first_was_killed(tmp_path: Path) -> None:
    first = tmp_path / "eagle3" / "checkpoint-1"
    with start(tmp_path) as process:
        while not first.is_dir():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert not (tmp_path / "eagle3" / "training_record.json").exists()
    kept = [tmp_path / "replies.jsonl.gz", first / "model.safetensors"]
    times = [file.stat().st_mtime_ns for file in kept]

    process = start(tmp_path)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert [file.stat().st_mtime_ns for file in kept] == times, "made once"
    assert said.count("starting from the beginning") == 1, "of MTP heads only"
    assert said.endswith(f"done: {tmp_path}/eagle3 {tmp_path}/mtp\n")
    for kind in ("eagle3", "mtp"):
        record = json.loads((tmp_path / kind / "training_record.json").read_text())
        assert record["training"]["steps"] == 2
        assert DraftHeads.from_pretrained(tmp_path / kind).config.head_type == kind
