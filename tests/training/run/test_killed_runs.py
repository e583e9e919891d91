"""A run that is killed anywhere, even while it writes a checkpoint, and resumed, is the run that was not killed:
weights, optimizer, order of the data, random numbers and log lines are equal bit for bit."""

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import needs_muon
from tests.processes import end_ranks, start_process, start_ranks
from tests.training.killed_run import run_and_die, run_rank_and_die
from tests.training.runner import Runner, assert_same

# Checkpoints lie in the middle of epochs (5 batches), and before and after evaluations.
OFTEN: dict[str, Any] = {
    "max_steps": 9,
    "logging_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_total_limit": 2,
}
# Random noise on the features; two optimizers; an order that follows from lengths and random numbers.
EAGLE = {
    **OFTEN,
    "head_type": "eagle",
    "head_overrides": None,
    "muon_learning_rate": 0.02,
    "train_sampling_strategy": "group_by_length",
}
# Random anchors, accumulated batches, the plain order.
BLOCK = {
    **OFTEN,
    "head_type": "block",
    "head_overrides": ["num_anchors=3", "block_size=3"],
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}


def run(train: Runner, options: dict[str, Any], last: int | None, first_step: int = 0) -> int:
    """One run in a process of its own; returns its exit code."""
    arguments = train.arguments(**options)
    count_file = train.output_dir.parent / "moments"
    process = start_process(run_and_die, arguments, train.output_dir, last, count_file, first_step)
    process.join()
    return int(process.exitcode)


def history(output_dir: Path) -> list[dict[str, Any]]:
    """The log lines without what a clock says."""
    state = json.loads((output_dir / "checkpoint-9" / "trainer_state.json").read_text())
    clock = ("runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(clock)} for entry in state["log_history"]]


def assert_equal_checkpoints(one: Path, other: Path) -> None:
    files = {file.relative_to(one) for file in one.rglob("*") if file.is_file()}
    assert files == {file.relative_to(other) for file in other.rglob("*") if file.is_file()}
    for name in files:
        if name.suffix == ".safetensors":
            assert_same(load_file(one / name), load_file(other / name))
        elif name.suffix in (".pt", ".pth") and name.name != "training_args.bin":
            stored, found = (torch.load(folder / name, weights_only=False) for folder in (one, other))
            assert is_same(stored, found), name


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool((torch.as_tensor(one) == torch.as_tensor(other)).all() if hasattr(one, "shape") else one == other)


def uninterrupted(train: Runner, options: dict[str, Any]) -> tuple[Path, int, random.Random]:
    """The folder of a run that nobody kills, its number of moments, and a generator to draw some of them."""
    seed = random.SystemRandom().randrange(10**9)  # tests begin with seeded generators
    print(f"moments drawn with seed {seed}")  # shown when the test fails
    assert run(train, options, None) == 0
    num_moments = int((train.output_dir.parent / "moments").read_text())
    assert num_moments > 100
    return train.output_dir.rename(train.output_dir.with_name("uninterrupted")), num_moments, random.Random(seed)


def kill(train: Runner, options: dict[str, Any], last: int, first_step: int = 0) -> int:
    """A run or resumed run that dies at moment `last`, counted from the end of `first_step`; returns the step of its
    newest checkpoint."""
    print(f"killed at moment {last} from step {first_step} on")
    assert run(train, {**options, "resume_from_checkpoint": True}, last, first_step) == -signal.SIGKILL
    folders = list(train.output_dir.glob("checkpoint-*"))
    assert all((folder / "run.json").is_file() for folder in folders), "half a checkpoint"
    return max((int(folder.name.removeprefix("checkpoint-")) for folder in folders), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kills"),
    [pytest.param(EAGLE, 1, id="eagle", marks=[needs_muon, pytest.mark.ci]), pytest.param(BLOCK, 3, id="block")],
)
def test_a_run_that_is_killed_anywhere(train: Runner, options: dict[str, Any], kills: int) -> None:
    """Each time at other moments; one of the runs twice."""
    expected, num_moments, draw = uninterrupted(train, options)
    for last in sorted(draw.sample(range(1, num_moments), kills)):
        kill(train, options, last)
        finish_and_compare(train, options, expected)
        shutil.rmtree(train.output_dir)
    if options is EAGLE:
        kill(train, options, draw.randrange(1, num_moments // 2))
        # The second time in the middle of the second epoch: after step 7, or within step 8 and its checkpoint.
        assert kill(train, options, draw.randrange(1, 25), first_step=7) in (6, 8)
        finish_and_compare(train, options, expected)


def finish_and_compare(train: Runner, options: dict[str, Any], expected: Path) -> None:
    assert run(train, {**options, "resume_from_checkpoint": True}, None) == 0
    assert history(train.output_dir) == history(expected)
    assert_equal_checkpoints(expected / "checkpoint-9", train.output_dir / "checkpoint-9")
    assert_same(load_file(expected / "model.safetensors"), train.weights())
    one, other = (json.loads((folder / "training_record.json").read_text()) for folder in (expected, train.output_dir))
    assert {k: v for k, v in one["metrics"].items() if not k.endswith(("runtime", "per_second"))} == {
        k: v for k, v in other["metrics"].items() if not k.endswith(("runtime", "per_second"))
    }


@pytest.mark.ci
@pytest.mark.slow
@needs_muon
def test_one_of_two_processes_is_killed(train: Runner, tmp_path: Path) -> None:
    """It dies in its second epoch (of 3 batches each), in the middle of it; the other process ends as well. Random
    anchors, accumulated batches, two optimizers, an order of the data that follows from lengths and random numbers."""
    options = {**BLOCK, **{name: EAGLE[name] for name in ("muon_learning_rate", "train_sampling_strategy")}}

    def launch(last: int | None, *, resumes: bool = True) -> list[int | None]:
        arguments = train.arguments(**options, resume_from_checkpoint=resumes or None)
        run = (run_rank_and_die, arguments, train.output_dir, last, tmp_path / "moments")
        return end_ranks(start_ranks(2, tmp_path / "rank", *run))

    assert launch(None, resumes=False) == [0, 0], (tmp_path / "rank0").read_text()
    num_moments = int((tmp_path / "moments1").read_text())
    expected = tmp_path / "uninterrupted"
    train.output_dir.rename(expected)
    assert launch(int(num_moments * 0.58))[1] == -signal.SIGKILL
    steps = {int(folder.name.removeprefix("checkpoint-")) for folder in train.output_dir.glob("checkpoint-*")}
    assert max(steps) == 4, "not in the middle of an epoch: this test shows less"
    assert launch(None) == [0, 0]
    assert history(train.output_dir) == history(expected)
    assert_equal_checkpoints(expected / "checkpoint-9", train.output_dir / "checkpoint-9")
