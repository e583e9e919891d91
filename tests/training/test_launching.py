"""Training as it is launched: several processes, DeepSpeed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.training.runner import (
    Runner,
    assert_same,
)


@pytest.mark.slow
class TestLaunching:
    """The entry point in processes of its own."""

    TWO_PROCESSES = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    DEEPSPEED = ("accelerate.commands.launch", "--config_file", "configs/accelerate/deepspeed_zero2.yaml")
    EXACT: dict[str, Any] = {  # noqa: RUF012
        "head_overrides": ["ttt_steps=2"],
        "optim": "sgd",
        "learning_rate": 0.02,
        "max_grad_norm": 0.0,
        "max_steps": 4,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 2,
    }

    def launch(self, launcher: Sequence[str], arguments: list[str]) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-m", *launcher, "training/train_heads.py", *arguments]
        result = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=500
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    def test_accelerate_launch(self, train: Runner, tmp_path: Path) -> None:
        launcher = ["accelerate.commands.launch", "--config_file", "configs/accelerate/cpu.yaml"]
        config = tmp_path / "run.yaml"
        config.write_text(f"target: {train.defaults['target']}\nmax_steps: 100\n")
        arguments = train.arguments(target=None, config=config, max_steps=2)
        output = self.launch(launcher, arguments)
        assert "eval_acceptance_length" in output
        launched = train.weights()
        shutil.rmtree(train.output_dir)
        train(max_steps=2)
        assert_same(launched, train.weights())

    def test_a_wrong_option_ends_it_in_one_line_and_a_foreign_package_is_not_imported(self, tmp_path: Path) -> None:
        """Another distribution ships a package named `inference` as well."""
        (tmp_path / "inference").mkdir()
        (tmp_path / "inference" / "__init__.py").write_text("raise SystemExit('the foreign package was imported')\n")
        result = subprocess.run(
            [sys.executable, "training/train_heads.py", "--learning_rat", "0.1"],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 1
        assert (
            "train_heads.py: unknown key 'learning_rat' on the command line; did you mean 'learning_rate'"
            in result.stderr
        )
        assert "Traceback" not in result.stderr

    @pytest.mark.parametrize("launcher", [TWO_PROCESSES, DEEPSPEED], ids=["data parallel", "DeepSpeed ZeRO-2"])
    def test_two_processes_train_as_one_with_batches_of_twice_the_size(
        self, train: Runner, launcher: tuple[str, ...]
    ) -> None:
        """Plain SGD and the whole vocabulary, so that every predicted token has a loss and equal means equal; the
        second half is a resumed run."""
        if launcher == self.DEEPSPEED:
            pytest.importorskip("deepspeed")
        # With use_cpu accelerate would fall back to plain data parallelism.
        options = {**self.EXACT, "per_device_train_batch_size": 2, "use_cpu": launcher != self.DEEPSPEED}
        self.launch(launcher, train.arguments(**options))
        newest = train.output_dir / "checkpoint-4"
        assert {path.name for path in newest.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
        assert (newest / "global_step4").is_dir() == (launcher == self.DEEPSPEED)
        (newest / "trainer_state.json").unlink()
        output = self.launch(launcher, train.arguments(**options, resume_from_checkpoint=True))
        assert output.count("checkpoint-4 is passed over: trainer_state.json is missing") == 1
        two = train.weights()
        metrics = json.loads((train.output_dir / "training_record.json").read_text())["metrics"]

        shutil.rmtree(train.output_dir)
        expected = train(**self.EXACT, per_device_train_batch_size=4)
        for name, tensor in train.weights().items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)
        for name in ("eval_loss", "eval_top1_depth1", "eval_top5_depth2", "eval_acceptance_length"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3)
