"""An interrupted run goes on as if nothing had happened, or says why it cannot."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import needs_muon
from tests.training.runner import (
    WORDS,
    InterruptedRunError,
    Runner,
    assert_same,
    interrupt_at_step,
    write_conversations,
)
from training import run as run_module
from training.trainer import HeadsTrainer


class TestResume:
    """Eight steps of which every second is saved; six batches an epoch, so that the run crosses into the next one."""

    SAVED: dict[str, Any] = {  # noqa: RUF012
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_total_limit": 0,
    }

    @pytest.fixture
    def uninterrupted(self, train: Runner) -> dict[str, Tensor]:
        train(**self.SAVED)
        weights = train.weights()
        shutil.rmtree(train.output_dir)
        return weights

    def interrupt(self, train: Runner, step: int, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at_step(step, patch)
            with pytest.raises(InterruptedRunError):
                train(**self.SAVED, **options)

    @pytest.mark.parametrize("step", [5, 7])
    def test_gives_the_weights_of_an_uninterrupted_run(
        self, train: Runner, uninterrupted: dict[str, Tensor], step: int
    ) -> None:
        self.interrupt(train, step)
        assert not (train.output_dir / "model.safetensors").exists()
        train(**self.SAVED, resume_from_checkpoint=True)
        assert_same(train.weights(), uninterrupted)
        state = json.loads((train.output_dir / "checkpoint-8" / "trainer_state.json").read_text())
        assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == list(range(1, 9))

    @needs_muon
    def test_goes_on_with_muon(self, train: Runner, uninterrupted: dict[str, Tensor]) -> None:
        options = {**self.SAVED, "muon_learning_rate": 0.02}
        train(**options)
        weights = train.weights()
        assert not torch.equal(weights["fc.weight"], uninterrupted["fc.weight"]), "that is what AdamW learns"
        shutil.rmtree(train.output_dir)
        self.interrupt(train, 5, muon_learning_rate=0.02)
        train(**options, resume_from_checkpoint=True)
        assert_same(train.weights(), weights)

    def test_passes_over_a_torn_checkpoint(
        self, train: Runner, uninterrupted: dict[str, Tensor], caplog: pytest.LogCaptureFixture
    ) -> None:
        self.interrupt(train, 7)
        weights = train.output_dir / "checkpoint-6" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        (train.output_dir / "checkpoint-4" / "trainer_state.json").unlink()
        with caplog.at_level(logging.WARNING):
            train(**self.SAVED, resume_from_checkpoint=True)
        assert "checkpoint-6 is passed over: model.safetensors is cut off" in caplog.text
        assert "checkpoint-4 is passed over: trainer_state.json is missing" in caplog.text
        assert_same(train.weights(), uninterrupted)

    def test_a_full_disk_leaves_the_checkpoint_before(
        self, train: Runner, uninterrupted: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save = torch.save
        written: list[str] = []

        def fail_at_the_third_optimizer(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            written.append(Path(path).name)
            if written.count("optimizer.pt") == 3:
                Path(path).write_bytes(b"half")
                raise OSError(28, "No space left on device")
            save(content, path, *args, **kwargs)

        monkeypatch.setattr(torch, "save", fail_at_the_third_optimizer)
        with pytest.raises(OSError, match="No space left"):
            train(**self.SAVED)
        monkeypatch.setattr(torch, "save", save)
        assert (train.output_dir / "checkpoint-6" / "model.safetensors").exists()
        train(**self.SAVED, resume_from_checkpoint=True)
        assert_same(train.weights(), uninterrupted)

    def test_keeps_the_draft_vocabulary_of_the_checkpoint(
        self, train: Runner, conversations: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.interrupt(train, 5)
        vocabulary = load_file(train.output_dir / "checkpoint-4" / "model.safetensors")["d2t"]
        write_conversations(conversations, words=WORDS[::-1][:30], seed=5)
        train(**self.SAVED, resume_from_checkpoint=True)
        assert torch.equal(train.weights()["d2t"], vocabulary)
        shutil.rmtree(train.output_dir)
        train(max_steps=1)
        assert not torch.equal(train.weights()["d2t"], vocabulary), "the data would give another one"

    def test_counts_no_tokens(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.interrupt(train, 5)

        def fail(*args: Any) -> Tensor:
            raise AssertionError("the vocabulary is stored with the heads")

        monkeypatch.setattr(run_module, "count_tokens", fail)
        train(**self.SAVED, resume_from_checkpoint=True)

    def test_a_finished_run_trains_and_evaluates_nothing(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        metrics = train(**self.SAVED)
        weights = train.weights()
        interrupt_at_step(8, monkeypatch)
        monkeypatch.setattr(HeadsTrainer, "evaluation_loop", None)
        assert train(**self.SAVED, resume_from_checkpoint=True) == pytest.approx(metrics, abs=1e-4)
        assert_same(train.weights(), weights)

    def test_other_heads_are_refused(self, train: Runner) -> None:
        self.interrupt(train, 5)
        with pytest.raises(ValueError, match=r"checkpoint-4 holds heads with ttt_steps 2 \(now 3\): resume"):
            train(resume_from_checkpoint=True, head_overrides=["ttt_steps=3", "draft_vocab_size=40"])

    def test_nothing_to_resume_starts_from_the_beginning(self, train: Runner, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            train(max_steps=1, resume_from_checkpoint=True)
        assert "no complete checkpoint in" in caplog.text
        assert train.weights()
