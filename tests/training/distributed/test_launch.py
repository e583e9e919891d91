"""The launch as requested, and as accelerate made it: a run that differs from its launch is refused."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from transformers.integrations import deepspeed as integration

from draftsmith.training.distributed.launch import check_launch
from draftsmith.training.distributed.waiting import one_process_at_a_time, one_process_first
from draftsmith.training.features.target_loading import load_model, loading_whole
from draftsmith.training.features.target_options import ModelArguments, PlacementArguments
from draftsmith.training.options.training_options import HeadsTrainingArguments


@pytest.fixture
def args(tmp_path: Path) -> HeadsTrainingArguments:
    return HeadsTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "started 2 processes, and this one sees 1 "),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, "without the others.*multi_gpu.yaml"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed was requested, .*NO with 1 processes"),
    ],
)
def test_a_silent_fallback_is_refused(
    environ: dict[str, str], message: str, args: HeadsTrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match=message):
        check_launch(args)


def test_zero_3_and_fsdp_split_nothing_while_models_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        def is_zero3(self) -> bool:
            return True

    config = Config()
    monkeypatch.setattr(integration, "_hf_deepspeed_config_weak_ref", None)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    integration.set_hf_deepspeed_config(config)
    with loading_whole():
        assert not integration.is_deepspeed_zero3_enabled()
    assert integration.is_deepspeed_zero3_enabled()


def test_a_target_is_not_split_in_one_process() -> None:
    placement = PlacementArguments(shard_target="fsdp2")
    with pytest.raises(ValueError, match=r"got shard_target fsdp2 .* one process"):
        load_model(ModelArguments("any", head_type="medusa"), placement, torch.device("cpu"), num_processes=1)


def run_in_turns(rank: int, folder: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", timeout=timedelta(seconds=1), rank=rank, world_size=2
    )
    with one_process_first():
        if rank == 0:
            time.sleep(2)
            (folder / "done").touch()
        assert (folder / "done").exists()
    with one_process_at_a_time():
        (folder / "busy").touch(exist_ok=False)
        time.sleep(0.2)
        (folder / "busy").unlink()
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_processes_wait_for_one_another_beyond_the_timeout(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(run_in_turns, args=(tmp_path,), nprocs=2, start_method="fork")
