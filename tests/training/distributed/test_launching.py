"""Training as it is launched, in one process; `test_distributed.py` has several."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.training.runner import (
    Runner,
    assert_same,
)


@pytest.mark.slow
class TestLaunching:
    """The entry point in processes of its own."""

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
