"""Several processes on the CPUs of one machine, launched with the files in configs/accelerate."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.heads import DraftHeads
from tests.processes import run_python
from tests.training.runner import Runner, assert_same, write_conversations

pytestmark = pytest.mark.slow

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the `deepspeed` extra")

# Two steps, a checkpoint, two steps. The epsilon keeps AdamW from making much of gradients that are rounding errors.
# The result is the last step, not the best one: on one short prompt, the acceptance length of step 2 is that of step 4.
OPTIONS: dict[str, Any] = {
    "adam_epsilon": 1e-4,
    "max_steps": 4,
    "lr_scheduler_type": "constant",
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": False,
    "use_cpu": None,
}


class Result(NamedTuple):
    weights: dict[str, Tensor]
    losses: list[float]
    record: dict[str, Any]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "conversations.jsonl")


@pytest.fixture(scope="module")
def alone(target_path: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The same run in one process, with batches of twice the size."""
    runner = Runner(target_path, conversations, tmp_path_factory.mktemp("alone") / "heads")
    runner(**{**OPTIONS, "use_cpu": True, "per_device_train_batch_size": 4})
    return read(runner)


@pytest.fixture(scope="module")
def alone_in_bfloat16(target_path: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    runner = Runner(target_path, conversations, tmp_path_factory.mktemp("alone") / "heads")
    runner(**{**OPTIONS, "bf16": True, "use_cpu": True, "per_device_train_batch_size": 4})
    return read(runner)


def read(train: Runner) -> Result:
    state = json.loads((train.output_dir / "checkpoint-4" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    return Result(train.weights(), losses, json.loads((train.output_dir / "training_record.json").read_text()))


def arguments(train: Runner, **options: Any) -> list[str]:
    return train.arguments(**{**OPTIONS, "per_device_train_batch_size": 2, **options})


def launcher(config: str) -> list[str]:
    return ["-m", "accelerate.commands.launch", "--config_file", f"configs/accelerate/{config}.yaml"]


def launch(config: str, train: Runner, **options: Any) -> str:
    return run_python(*launcher(config), "training/train_heads.py", *arguments(train, **options))


@pytest.mark.parametrize(
    ("config", "distributed", "sharding"),
    [
        ("multi_gpu", {"distributed_type": "MULTI_CPU"}, "none"),
        ("fsdp2", {"distributed_type": "FSDP"}, "fsdp2"),
        pytest.param(
            "deepspeed_zero2", {"distributed_type": "DEEPSPEED", "zero_stage": 2}, "none", marks=needs_deepspeed
        ),
        pytest.param(
            "deepspeed_zero3",
            {"distributed_type": "DEEPSPEED", "zero_stage": 3},
            "fsdp2",
            marks=[needs_deepspeed, pytest.mark.ci],
        ),
    ],
)
def test_two_processes_train_as_one(
    config: str, distributed: dict[str, Any], sharding: str, train: Runner, alone: Result, target_path: Path
) -> None:
    """With twice the batch; and a run that is resumed half-way gives the very same weights and metrics, also where each
    process now holds half of the target's layers (split heads cut batches into as many documents either way).
    test_killed_runs.py resumes under DDP."""
    launch(config, train)
    whole = read(train)
    target = AutoModelForCausalLM.from_pretrained(target_path)
    num_parameters = sum(weight.numel() for weight in target.parameters())
    assert whole.record["distributed"] == {
        **distributed,
        "num_processes": 2,
        "target_parameters_per_process": num_parameters,
    }
    assert whole.losses == pytest.approx(alone.losses, rel=1e-5)
    for name, tensor in alone.weights.items():
        torch.testing.assert_close(whole.weights[name], tensor, rtol=1e-3, atol=1e-5)
    for name in ("eval_loss", "eval_top1_depth1", "eval_top5_depth2", "eval_acceptance_length"):
        assert whole.record["metrics"][name] == pytest.approx(alone.record["metrics"][name], rel=1e-4)
    assert_same(dict(DraftHeads.from_pretrained(train.output_dir).state_dict()), whole.weights)
    newest = train.output_dir / "checkpoint-4"
    assert_same(load_file(newest / "model.safetensors"), whole.weights)

    if config == "multi_gpu":
        return
    assert {path.name for path in newest.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    (newest / "trainer_state.json").unlink()
    output = launch(config, train, resume_from_checkpoint=True, shard_target=sharding)
    assert output.count("checkpoint-4 is skipped: trainer_state.json is missing") == 1
    resumed = read(train)
    assert_same(resumed.weights, whole.weights)
    assert resumed.losses == whole.losses
    in_layers = sum(weight.numel() for weight in target.model.layers.parameters())
    held = num_parameters - (in_layers // 2 if sharding != "none" else 0)
    assert resumed.record["distributed"]["target_parameters_per_process"] == held
    assert resumed.record["metrics"].keys() == whole.record["metrics"].keys()
    for name, value in whole.record["metrics"].items():
        if "runtime" not in name and "per_second" not in name:
            assert resumed.record["metrics"][name] == value, name


@pytest.mark.parametrize(
    ("config", "result"),
    [
        ("fsdp2", 4),
        ("fsdp2", 2),
        pytest.param("deepspeed_zero2", 4, marks=needs_deepspeed),
        pytest.param("deepspeed_zero3", 2, marks=needs_deepspeed),
    ],
)
def test_bfloat16_is_autocast_around_float32_weights(
    config: str, result: int, train: Runner, alone_in_bfloat16: Result
) -> None:
    """And a run that is killed after its last step goes on to the same result: that of its last step, 4, or of its best
    one, 2 (here the one with the highest loss)."""
    options: dict[str, Any] = {"bf16": True}
    if result == 2:
        options |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        options |= {"metric_for_best_model": "loss", "greater_is_better": True}
    launch(config, train, **options)
    whole = read(train)
    assert whole.losses == pytest.approx(alone_in_bfloat16.losses, rel=1e-3)
    trained = [tensor for tensor in whole.weights.values() if tensor.is_floating_point()]  # no draft vocabulary
    assert {tensor.dtype for tensor in trained} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in trained)
    assert_same(load_file(train.output_dir / f"checkpoint-{result}" / "model.safetensors"), whole.weights)

    for name in ("model.safetensors", "training_record.json"):
        (train.output_dir / name).unlink()
    launch(config, train, **options, resume_from_checkpoint=True)
    resumed = read(train)
    assert_same(resumed.weights, whole.weights)
    for name in ("eval_loss", "eval_top5_depth2", "eval_acceptance_length"):
        assert resumed.record["metrics"][name] == pytest.approx(whole.record["metrics"][name], rel=1e-5), name


@pytest.mark.parametrize("config", ["fsdp2", pytest.param("deepspeed_zero2", marks=needs_deepspeed)])
def test_a_shipped_configuration_trains_without_muon(config: str, conversations: Path, tmp_path: Path) -> None:
    """As docs/training.md has it, for two steps."""
    words = [*launcher(config), "training/train_heads.py", "--config", "configs/train/eagle3-chat-13m.yaml"]
    words += ["--dataset", str(conversations), "--max_samples", "20", "--validation_fraction", "0.2"]
    words += ["--max_steps", "2", "--num_eval_prompts", "0", "--metric_for_best_model", "loss"]
    words += ["--greater_is_better", "false", "--output_dir", str(tmp_path / "heads")]
    run_python(*words, "--muon_learning_rate", "none")
    assert DraftHeads.from_pretrained(tmp_path / "heads").config.head_type == "eagle3"
    with pytest.raises(AssertionError, match=r"got muon_learning_rate 0\.04 under DeepSpeed"):
        run_python(*words)
