"""What `--dry_run` says is what the run then does; what it cannot do is said at once, all of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from torch import nn

from tests.conftest import REPOSITORY
from tests.training.runner import Runner, interrupt_at_step, write_conversations
from training import train_heads
from training.features.options import FeatureArguments
from training.features.target_options import PlacementArguments
from training.options.checks import check_options
from training.options.command_line import parse_arguments
from training.reporting.dry_run import DryRun, StoppedError, dry_run
from training.reporting.run_costs import SavedTensors, num_times, project_seconds
from training.run.joint import JointArguments
from training.run.run import prepare_run

OPTIONS: dict[str, Any] = {
    "max_steps": -1,
    "num_train_epochs": 3,
    "gradient_accumulation_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
}


def try_out(train: Runner, **options: Any) -> DryRun:
    return dry_run(*parse_arguments(train.arguments(dry_run=True, **options)))


def test_what_autograd_keeps_is_counted_while_it_is_kept() -> None:
    layer = nn.Linear(50, 20)
    saved = SavedTensors(layer.parameters())
    with saved.watch():
        inputs = torch.zeros(10, 50)
        hidden = layer(inputs)  # keeps its inputs and its weight, which is there anyway
        assert saved.live == 10 * 50 * 4
        hidden.exp().sum().backward()  # exp keeps what it returns
    assert (saved.live, saved.peak) == (0, (10 * 50 + 10 * 20) * 4)


class TestFigures:
    def test_they_are_those_of_the_run(self, train: Runner) -> None:
        found = try_out(train, **OPTIONS)
        assert not found.problems
        assert not train.output_dir.exists()

        run = prepare_run(*parse_arguments(train.arguments(**OPTIONS)))
        run.finish()
        trainer = run.trainer
        figures = found.figures
        assert figures["steps"] == {"optimizer steps": trainer.state.global_step, "epochs": 3.0}
        rows = trainer.train_dataset
        assert figures["data"]["rows"] == len(rows)
        assert figures["data"]["tokens"] * 3 == trainer.state.num_input_tokens_seen
        assert figures["data"]["tokens that are learned"] == sum(map(sum, rows["loss_mask"]))
        assert 0.5 < figures["data"]["share of batches that is text"] < 1
        heads = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        assert figures["parameters"]["that are trained"] == sum(weight.numel() for weight in heads)
        memory = figures["memory of a process"]
        assert memory["gradients"] == sum(weight.nbytes for weight in heads)
        moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
        assert memory["optimizer"] == sum(moment.nbytes for moment in moments)
        assert memory["kept for the backward pass"] > memory["weights of the heads"]

        kept = sorted(train.output_dir.glob("checkpoint-*"))
        assert figures["disk"]["checkpoints at once"] == len(kept) + 1
        size = sum(file.stat().st_size for file in kept[-1].rglob("*"))
        assert figures["disk"]["a checkpoint"] == pytest.approx(size, rel=0.05)
        assert figures["time"]["sum"] > 0
        assert "evaluations (3)" in figures["time"]  # steps 4, 8 and 9

    def test_of_fewer_rows_than_a_step_takes(self, train: Runner, tmp_path: Path) -> None:
        few = write_conversations(tmp_path / "few.jsonl", count=5)
        held_out = write_conversations(tmp_path / "held-out.jsonl", count=5, seed=1)
        options = {"gradient_accumulation_steps": 2, "validation_fraction": None, "save_strategy": "best"}
        found = try_out(train, dataset=few, **options, eval_strategy="steps", eval_steps=1, eval_dataset=held_out)
        assert not found.problems
        assert found.figures["disk"]["checkpoints at once"] == 3, "at every evaluation, and two are kept"

    def test_of_a_stream(self, train: Runner) -> None:
        found = try_out(train, streaming=True, eval_strategy="steps", eval_steps=4)
        assert not found.problems
        assert found.figures["steps"] == {"optimizer steps": 8}
        assert found.figures["data (the first 512 rows of a stream)"]["rows"] == 512

    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by PEFT
    def test_of_heads_and_adapters(self, train: Runner) -> None:
        pytest.importorskip("peft")
        options = {"lora_r": 2, "muon_learning_rate": None}
        found = try_out(train, **options)
        assert not found.problems
        assert (
            found.figures["parameters"]["that are trained"] > try_out(train).figures["parameters"]["that are trained"]
        )

    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by PEFT
    def test_steps_of_heads_and_adapters_are_not_those_of_the_warm_up(self, train: Runner) -> None:
        """Which train the heads alone, and take less."""
        pytest.importorskip("peft")
        options = {"lora_r": 2, "muon_learning_rate": None}
        waits, at_once = (try_out(train, **options, heads_warmup_steps=steps) for steps in (6, 0))
        assert not waits.problems
        assert waits.figures["memory of a process"] == at_once.figures["memory of a process"]

    def test_a_hybrid_run_stores_nothing_and_says_what_it_would(self, train: Runner, tmp_path: Path) -> None:
        options = {"features": tmp_path / "deep" / "features", "feature_mode": "hybrid"}
        found = try_out(train, **options)
        assert not found.problems
        assert not (tmp_path / "deep").exists()
        train(**options, max_steps=5)
        written = {file: file.stat().st_mtime_ns for file in options["features"].iterdir()}
        stored = sum(file.stat().st_size for file in written if file.suffix == ".safetensors")
        assert found.figures["disk"]["features"] == pytest.approx(stored, abs=8000)
        assert "features" not in try_out(train, **options).figures["disk"]
        assert {file: file.stat().st_mtime_ns for file in options["features"].iterdir()} == written

    def test_seconds_of_all_steps(self) -> None:
        """Four steps of 10, 30, 20 and 10 tokens, where 10 take 1 s and 20 take 3 s."""
        assert project_seconds([10, 30, 20], 4, {20: 3.0, 10: 1.0}) == pytest.approx(1 + 5 + 3 + 1)
        assert project_seconds([10, 30], 2, {10: 1.0, 20: 0.5}) == 2.0, "noise: more tokens are not faster"
        assert project_seconds([10, 10], 3, {10: 2.0}) == 6.0

    @pytest.mark.parametrize(
        ("strategy", "every", "times"), [("no", 2, 0), ("steps", 3, 4), ("steps", 0.25, 4), ("epoch", 2, 3)]
    )
    def test_how_often(self, strategy: str, every: float, times: int) -> None:
        assert num_times(strategy, every, 10, 2.5) == times
        assert num_times("steps", 0, 10, 2.5) == 1, "at the end"

    @pytest.mark.slow
    def test_memory_on_the_embedded_target(self, tmp_path: Path) -> None:
        """What the process really grows by, from the loaded models on, is within a third of what is foretold."""
        config = REPOSITORY / "configs" / "train" / "eagle3-chat-13m-quick.yaml"
        program = f"""
import gc, sys
from pathlib import Path
from training.options.command_line import parse_arguments
from training.run.run import prepare_run
run = prepare_run(*parse_arguments({["--config", str(config), "--max_steps", "3", "--output_dir", str(tmp_path)]!r}))
def resident(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the largest size begins anew
before = resident("VmRSS")
run.trainer.train()
print(resident("VmHWM") - before)
"""
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # large blocks are given back when they are freed
        options: dict[str, Any] = {"cwd": REPOSITORY, "env": environment, "check": True, "stdout": subprocess.PIPE}
        grown = int(subprocess.run([sys.executable, "-c", program], **options).stdout.split()[-1])
        found = dry_run(*parse_arguments(["--config", str(config), "--dry_run", "true", "--max_steps", "3"]))
        memory = found.figures["memory of a process"]
        foretold = memory["sum"] - memory["weights of the target"] - memory["weights of the heads"]
        print(f"{foretold / 2**20:.0f} MiB foretold, {grown / 2**20:.0f} MiB grown")
        assert foretold == pytest.approx(grown, rel=1 / 3)


class TestProblems:
    def test_all_are_listed_together(self, train: Runner, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        found = try_out(
            train, output_dir=tmp_path / "file" / "heads", dataset="nowhere.jsonl", eval_prompts="none.jsonl"
        )
        problems = "\n".join(found.problems)
        assert "output_dir: [Errno 20] Not a directory" in problems
        assert "dataset nowhere.jsonl does not exist" in problems
        assert "none.jsonl, which is no file" in problems
        assert len(found.problems) == 3

    def test_a_target_that_is_not_there_hides_nothing(self, train: Runner, target_path: Path, tmp_path: Path) -> None:
        """The tokenizer is, so that the data can be looked at."""
        tokenizer = tmp_path / "tokenizer"
        tokenizer.mkdir()
        for file in target_path.glob("token*"):
            (tokenizer / file.name).write_bytes(file.read_bytes())
        (tokenizer / "chat_template.jinja").write_text((target_path / "chat_template.jinja").read_text())
        found = try_out(train, target=tokenizer, dataset="nowhere.jsonl")
        assert [problem.partition(":")[0] for problem in found.problems] == ["loading", "data"]

    def test_options_data_and_prompts_are_looked_at_apart(self, train: Runner) -> None:
        contradictions = {"packing": True, "train_sampling_strategy": "group_by_length", "lora_r": 2, "features": "x"}
        found = try_out(train, dataset="nowhere.jsonl", eval_prompts="none.jsonl", **contradictions)
        for expected in ("options: got features x with lora_r 2: ", "; and got packing and train_sampling_strategy"):
            assert expected in found.problems[0]
        assert [problem.partition(":")[0] for problem in found.problems] == ["options", "data", "eval_prompts"]

    def test_nothing_is_made_on_the_hub(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("a repository was to be made")

        monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
        monkeypatch.setattr("transformers.trainer.create_repo", refuse, raising=False)
        monkeypatch.setattr("huggingface_hub.HfApi.whoami", lambda self, token=None: {"name": "someone"})
        found = try_out(train, push_to_hub=True)
        assert not found.problems
        assert "push_to_hub" in found.passed

        def unknown(self: Any, token: Any = None) -> None:
            raise RuntimeError("Invalid user token.")

        monkeypatch.setattr("huggingface_hub.HfApi.whoami", unknown)
        assert try_out(train, push_to_hub=True).problems == ["push_to_hub: cannot log in: Invalid user token."]

    @pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="mlflow is installed")
    def test_a_backend_that_is_not_installed(self, train: Runner) -> None:
        found = try_out(train, report_to=["tensorboard", "mlflow"])
        expected = 'options: got report_to mlflow, which is not installed: pip install "draftsmith[mlflow]", or leave'
        assert [problem[: len(expected)] for problem in found.problems] == [expected]

    def test_steps_that_fail(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr("training.run.trainer.HeadsTrainer.training_step", fail)
        found = try_out(train)
        assert found.problems == ["training steps: out of memory"]
        assert found.figures["steps"]["optimizer steps"] == 8

    def test_heads_alone_may_be_saved(self, train: Runner) -> None:
        assert not try_out(train, save_strategy="steps", save_steps=4, save_only_model=True).problems

    def test_a_target_on_several_gpus_is_none(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        _, data, training, *_ = parse_arguments(train.arguments())
        monkeypatch.setattr(type(training), "n_gpu", 2)
        more = (JointArguments(), PlacementArguments(target_device_map="auto"), FeatureArguments())
        check_options(data, training, *more)
        with pytest.raises(ValueError, match="one process sees 2 GPUs"):
            check_options(data, training, JointArguments(), PlacementArguments(), FeatureArguments())

    def test_readers_of_a_stream_without_conversations(self, train: Runner, tmp_path: Path) -> None:
        line, *_ = Path(train.defaults["dataset"]).read_text().splitlines()
        (tmp_path / "few.jsonl").write_text(line)
        options = {"dataset": tmp_path / "few.jsonl", "validation_fraction": 0, "dataloader_num_workers": 2}
        problem = try_out(train, streaming=True, **options).problems[0]
        assert problem.startswith("reading the data: ")
        assert "can be used by this reader, one of 1 processes, times 2 dataloader_num_workers" in problem

    def test_of_one_process_ends_it(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        """The others would wait for it."""
        monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
        found = DryRun()
        with pytest.raises(StoppedError):
            found.check("training steps", lambda: int("x"), together=True)
        assert found.check("decoding", lambda: int("x")) is None
        assert len(found.problems) == 1, "the same"

    @pytest.mark.slow
    def test_of_one_process_alone_are_told(self, train: Runner, tmp_path: Path) -> None:
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "tests.training.killed_run"]
        command = [sys.executable, "-m", *launcher, "no_memory", *train.arguments(dry_run=True)]
        (tmp_path / "scratch").mkdir()
        environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
        run = subprocess.run(command, cwd=REPOSITORY, env=environment, **options)
        assert run.returncode != 0
        assert "train_heads.py, process 1: training steps: out of memory" in run.stderr
        assert not [*(tmp_path / "scratch").rglob("*.safetensors")]
        assert not train.output_dir.exists()

    def test_early_stopping_is_none(self, train: Runner) -> None:
        assert not try_out(train, eval_strategy="steps", eval_steps=4, early_stopping_patience=2).problems

    def test_a_disk_that_is_too_small(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        found = try_out(train, save_strategy="steps", save_steps=2)
        assert len(found.problems) == 1
        assert "1,000 are free: lower save_total_limit" in found.problems[0]


class TestProgram:
    def run(self, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
        monkeypatch.setattr("sys.argv", ["train_heads.py", *words])
        monkeypatch.setattr("sys.path", [*sys.path])
        return train_heads.main()

    @pytest.mark.parametrize("has_rich", [True, False])
    def test_shows_and_writes_what_was_found(
        self,
        train: Runner,
        has_rich: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        if not has_rich:
            find_spec = importlib.util.find_spec
            monkeypatch.setattr(
                importlib.util, "find_spec", lambda name, *a: None if name == "rich" else find_spec(name, *a)
            )
        file = tmp_path / "dry.json"
        assert self.run(train.arguments(dry_run=True, dry_run_json=file, max_length=1000), monkeypatch) == 0
        assert json.loads(file.read_text())["figures"]["steps"] == {"optimizer steps": 8, "epochs": 1.6}
        output = capsys.readouterr().out
        assert "optimizer steps" in output
        assert "no problem found" in output
        assert "max_length is 1000, the target takes 256 tokens" in output
        assert not train.output_dir.exists()

    def test_ends_with_an_error(
        self, train: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        interrupt_at_step(0, monkeypatch)
        assert self.run(train.arguments(dry_run=True, dataset="nowhere.jsonl"), monkeypatch) == 1
        assert "dataset nowhere.jsonl does not exist" in capsys.readouterr().out

    def test_a_file_without_a_dry_run_is_refused(self, train: Runner) -> None:
        with pytest.raises(ValueError, match="got dry_run_json 'x' without dry_run"):
            parse_arguments(train.arguments(dry_run_json="x"))
