"""Adapters of the target with two processes on the CPUs of one machine."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

from tests.training.distributed.test_distributed import OPTIONS, launch, needs_deepspeed, read
from tests.training.runner import Runner, assert_same

pytest.importorskip("peft", reason="peft is an optional extra")

# peft asks transformers by a name that transformers has deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]

_NAMES = {key.name for key in dataclasses.fields(TrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _NAMES else "gradient_checkpointing"
JOINT: dict[str, Any] = {"lora_r": 4, "heads_loss_weight": 0.2, "warmup_steps": 0, "learning_rate": 0.002}


@pytest.mark.parametrize("config", ["multi_gpu", pytest.param("deepspeed_zero2", marks=needs_deepspeed)])
def test_two_processes_train_as_one(config: str, train: Runner) -> None:
    """With twice the batch; and a run that is resumed half-way gives the very same weights."""
    alone = Runner(Path(train.defaults["target"]), Path(train.defaults["dataset"]), train.output_dir.with_name("alone"))
    alone(**{**OPTIONS, **JOINT, "use_cpu": True, "per_device_train_batch_size": 4})
    launch(config, train, **JOINT, **{CHECKPOINTING: True})
    whole, expected = read(train), read(alone)
    assert whole.losses == pytest.approx(expected.losses, rel=1e-4)
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(whole.weights[name], tensor, rtol=1e-3, atol=1e-5)
    file = Path("adapter") / "adapter_model.safetensors"
    adapter = load_file(train.output_dir / file)
    for name, tensor in load_file(alone.output_dir / file).items():
        torch.testing.assert_close(adapter[name], tensor, rtol=1e-3, atol=1e-5)
        assert tensor.any()
    for name in ("eval_loss", "eval_target_loss", "eval_acceptance_length"):
        assert whole.record["metrics"][name] == pytest.approx(expected.record["metrics"][name], rel=1e-3)

    (train.output_dir / "checkpoint-4" / "trainer_state.json").unlink()
    launch(config, train, **JOINT, **{CHECKPOINTING: True}, resume_from_checkpoint=True)
    assert_same(read(train).weights, whole.weights)
    assert_same(load_file(train.output_dir / file), adapter)


def test_split_heads_are_refused(train: Runner) -> None:
    with pytest.raises(AssertionError, match=r"lora_r .* FSDP and ZeRO-3 cannot split"):
        launch("fsdp2", train, lora_r=4)
