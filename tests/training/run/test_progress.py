"""What a run says while it trains, and Ctrl-C: a checkpoint first, and the run goes on from it."""

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftsmith.training import train_heads
from draftsmith.training.run import progress
from draftsmith.training.run.outcome import describe_interrupted
from tests.conftest import REPOSITORY
from tests.training.runner import Runner, assert_same, interrupt_at_step


@pytest.fixture(autouse=True)
def _restore_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


EVERY_EPOCH: dict[str, Any] = {"eval_strategy": "epoch", "num_train_epochs": 2, "max_steps": -1}


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, *, step: int, times: int = 1) -> None:
    """In the middle of the step after `step` steps."""

    def press() -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    interrupt_at_step(step, monkeypatch, press)


def test_lines_follow_the_clock(
    train: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 1e6)
    with caplog.at_level(logging.INFO):
        metrics = train(logging_steps=None, max_steps=5)
    lines = [line.getMessage() for line in caplog.records if line.name == progress.__name__]
    steps = [int(found[1]) for line in lines if (found := re.match(r"step (\d+) of 5 \(epoch \d\.\d\d\): loss ", line))]
    assert steps == [1, 4, 5]
    assert all("right at depth 1" in line and " tokens/s, " in line for line in lines if line.startswith("step"))
    assert "left" in lines[0]
    assert re.search(r"this run reads \d+ tokens, .* 3 million", caplog.text)
    assert lines[-1].startswith(f"held out: acceptance length {metrics['eval_acceptance_length']:.2f}, loss ")


@pytest.mark.parametrize("step", [2, 4])  # in the middle of an epoch of 5 steps, and at its end
def test_ctrl_c_saves_a_checkpoint_from_which_the_run_goes_on(
    step: int, train: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(**EVERY_EPOCH)
    expected = train.weights()
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, step=step)
        with pytest.raises(KeyboardInterrupt):
            train(**EVERY_EPOCH)
    assert signal.getsignal(signal.SIGINT) is handler
    newest = train.output_dir / f"checkpoint-{step + 1}"
    assert newest.is_dir()
    words = shlex.split(describe_interrupted(train.output_dir, 10**6).partition("Continue: ")[2])
    assert words[:3] == ["draftsmith", "train", "--config"]
    with monkeypatch.context() as patch:  # another number of processes would be another run
        patch.setenv("WORLD_SIZE", "2")
        assert "Continue, with the same launcher: -m draftsmith train" in describe_interrupted(train.output_dir, 10**6)
    monkeypatch.setattr(sys, "argv", words[1:])
    assert train_heads.main() == 0
    assert_same(expected, train.weights())


def test_a_second_ctrl_c_ends_at_once(
    train: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    press_ctrl_c(monkeypatch, step=2, times=2)
    monkeypatch.setattr(sys, "argv", ["draftsmith train", *train.arguments()])
    with pytest.raises(SystemExit) as ended:
        train_heads.main()
    assert ended.value.code == 130
    assert not [*Path(train.output_dir).glob("checkpoint-*")]
    assert shlex.split(capsys.readouterr().err.partition("Again: ")[2])[:2] == ["draftsmith", "train"]


def interrupt(words: Sequence[str], *, when: str) -> str:
    """Runs `draftsmith WORDS`, interrupts it when its error output has `when` (a regular expression), and returns the
    last line. There is no traceback, and the status is that of Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, "-m", "draftsmith", *words],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    ) as process:
        told = ""
        while not re.search(when, told):
            piece = process.stderr.read(1)
            assert piece, told
            told += piece
        os.killpg(process.pid, signal.SIGINT)
        told += process.stderr.read()
    assert process.returncode == 130, told
    assert "Traceback" not in told
    return told.splitlines()[-1]


@pytest.mark.ci
@pytest.mark.slow
def test_ctrl_c_in_a_process_of_its_own(train: Runner) -> None:
    words = ["train", *train.arguments(max_steps=100_000, logging_steps=1)]
    _, found, again = re.split(r"interrupted; |\. Continue: ", interrupt(words, when=r"step [\d,]+ of 100,000 "))
    step = int(re.findall(r"checkpoint-(\d+)", found)[0])
    assert step > 0
    assert (train.output_dir / f"checkpoint-{step}" / "optimizer.pt").is_file()
    assert shlex.split(again)[:3] == ["draftsmith", "train", "--config"]
