"""Runs that cannot go on: what they say, and what they leave behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from draftsmith.training.run.outcome import PreparedRun
from draftsmith.training.run.stopping import TrainingStoppedError
from tests.processes import start_process
from tests.training.killed_run import run_with_full_disk
from tests.training.runner import Runner, assert_same

SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "num_eval_prompts": 0}


class HugeRate(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            for group in kwargs["optimizer"].param_groups:
                group["lr"] = 1e30


class TestNotFinite:
    def stop(self, run: PreparedRun) -> str:
        with pytest.raises(TrainingStoppedError) as error:
            run.finish()
        return str(error.value)

    def test_a_huge_learning_rate(self, train: Runner) -> None:
        """Three good steps; the fourth throws the weights away, and at the fifth the optimizer is stopped."""
        run = train.prepare(**SAVED, gradient_accumulation_steps=2)
        run.trainer.add_callback(HugeRate())
        message = self.stop(run)
        assert message.startswith("stopped at step 5: the loss at depth 1, 2 is NaN")
        assert "Try a lower learning_rate" in message
        newest = train.output_dir / "checkpoint-4"
        assert f"{newest}; --resume_from_checkpoint true" in message

    def test_states_of_the_target(self, train: Runner) -> None:
        run = train.prepare(**SAVED)
        with torch.no_grad():
            run.trainer.target.model.model.norm.weight[0] = torch.inf
        message = self.stop(run)
        assert "stopped at step 1: the target's states" in message
        assert "Try target_dtype bfloat16" in message

    def test_a_gradient(self, train: Runner) -> None:
        run = train.prepare(**SAVED)
        run.trainer.model.fc.weight.register_hook(lambda gradient: gradient * torch.inf)
        assert "stopped at step 1: the gradient (its norm is " in self.stop(run)


class TestFullDisk:
    @pytest.mark.ci
    @pytest.mark.slow
    def test_the_checkpoint_before_stays_and_is_resumed(self, train: Runner, tmp_path: Path) -> None:
        """The kernel itself refuses to write the file any further."""
        train(**SAVED)
        weights = train.weights()
        num_bytes = (train.output_dir / "checkpoint-8" / "optimizer.pt").stat().st_size - 100
        train.output_dir.rename(tmp_path / "uninterrupted")
        message = tmp_path / "message"
        start_process(run_with_full_disk, train.arguments(**SAVED), 5, num_bytes, message).join()
        assert message.read_text()
        assert {folder.name for folder in train.output_dir.iterdir()} == {
            "checkpoint-2",
            "checkpoint-4",
            "training_config.yaml",
        }
        train(**SAVED, resume_from_checkpoint=True)
        assert_same(train.weights(), weights)
