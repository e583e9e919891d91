"""An interrupted run goes on as if nothing had happened, or says why it cannot."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.training.run.evaluation import AcceptanceMeter
from draftsmith.training.run.resume import find_checkpoint, find_damage
from draftsmith.training.run.trainer import HeadsTrainer
from tests.params import slow_but
from tests.training.runner import WORDS, Runner, assert_same, interrupt_at_step, write_conversations

# Kinds that draw in training, with settings that let every row draw: block anchors, dropped rows, feature noise.
DRAWN = {
    "block": ["num_anchors=2", "block_size=3"],
    "parallel": ["num_depths=3", "keep_ratio=0.5"],
    "eagle": ["feature_noise=0.5"],
}


class TestResume:
    """Eight steps of which every second is saved; six batches an epoch, so that the run crosses into the next one."""

    SAVED: dict[str, Any] = {  # noqa: RUF012
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_total_limit": 0,
    }

    @pytest.fixture(scope="class")
    @classmethod
    def uninterrupted(cls, target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
        folder = tmp_path_factory.mktemp("uninterrupted")
        train = Runner(target_path, write_conversations(folder / "conversations.jsonl"), folder / "heads")
        train(**cls.SAVED)
        return train.weights()

    @pytest.mark.parametrize("kind", slow_but({"block"}, DRAWN.keys()))
    def test_goes_on_with_the_random_draws_of_the_next_step(self, train: Runner, kind: str) -> None:
        """Two steps, an interruption and two more are four steps: also where slots or noise are drawn."""
        options = {"head_type": kind, "head_overrides": DRAWN[kind], "max_steps": 4, "save_strategy": "steps"}
        options |= {"save_steps": 2, "num_eval_prompts": 0}
        train(**options)
        weights = train.weights()
        shutil.rmtree(train.output_dir)
        train.break_off(3, **options)
        train(**options, resume_from_checkpoint=True)
        assert_same(train.weights(), weights)

    def test_goes_on_behind_what_is_measured_at_the_end_of_an_epoch(self, train: Runner) -> None:
        options = {**self.SAVED, "eval_strategy": "epoch", "save_steps": 5, "max_steps": 12}
        train(**options)
        weights = train.weights()

        def measured(step: int) -> list[int]:
            state = json.loads((train.output_dir / f"checkpoint-{step}" / "trainer_state.json").read_text())
            return [entry["step"] for entry in state["log_history"] if "eval_loss" in entry]

        assert (measured(5), measured(10), measured(12)) == ([5], [5, 10], [5, 10, 12])
        for step in (10, 12):
            shutil.rmtree(train.output_dir / f"checkpoint-{step}")
        train(**options, resume_from_checkpoint=True)
        assert measured(12) == [5, 10, 12]
        assert_same(train.weights(), weights)

    def test_keeps_the_draft_vocabulary_of_the_checkpoint(self, train: Runner, conversations: Path) -> None:
        train.break_off(5, **self.SAVED)
        vocabulary = load_file(train.output_dir / "checkpoint-4" / "model.safetensors")["d2t"]
        write_conversations(conversations, words=WORDS[::-1][:30], seed=5)
        train(**self.SAVED, resume_from_checkpoint=True, resume_with_changes=True)
        assert torch.equal(train.weights()["d2t"], vocabulary)
        shutil.rmtree(train.output_dir)
        assert not torch.equal(train.prepare().trainer.heads.d2t, vocabulary), "the data would give another one"

    def test_a_finished_run_trains_and_evaluates_nothing(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        metrics = train(**self.SAVED)
        weights = train.weights()
        interrupt_at_step(8, monkeypatch)
        monkeypatch.setattr(HeadsTrainer, "evaluation_loop", None)
        assert train(**self.SAVED, resume_from_checkpoint=True) == pytest.approx(metrics, abs=1e-4)
        assert_same(train.weights(), weights)

    def test_another_run_is_refused(self, train: Runner) -> None:
        """Everything that differs is named at once."""
        train.break_off(5, **self.SAVED)
        changes: dict[str, Any] = {
            "loss_type": "cross_entropy",
            "max_length": 63,
            "max_steps": 9,
            "per_device_train_batch_size": 2,
            "seed": 1,
            "train_sampling_strategy": "group_by_length",
        }
        with pytest.raises(ValueError, match="checkpoint-4 was trained with ") as error:
            train(**{**self.SAVED, **changes}, resume_from_checkpoint=True)
        different = (
            "loss_type None (now 'cross_entropy'), max_length 64 (now 63), max_steps 8 (now 9), "
            "per_device_train_batch_size 4 (now 2), seed 42 (now 1), train_sampling_strategy 'random' (now "
            "'group_by_length'), training data '18 rows of "
        )
        assert different in str(error.value)
        assert "--resume_with_changes true" in str(error.value)
        with pytest.raises(ValueError, match=r"head_overrides \{'ttt_steps': 2.*\} \(now \{'ttt_steps': 3\}\)"):
            train(**self.SAVED, head_overrides=["ttt_steps=3"], resume_from_checkpoint=True, resume_with_changes=True)

    def test_other_data_are_refused_and_moved_ones_are_not(
        self, train: Runner, conversations: Path, uninterrupted: dict[str, Tensor], caplog: pytest.LogCaptureFixture
    ) -> None:
        train.break_off(5, **self.SAVED)
        moved = conversations.rename(conversations.with_name("moved.jsonl"))
        write_conversations(conversations, seed=5)
        with pytest.raises(ValueError, match=r"with training data '18 rows .* \(now '18 rows"):
            train(**self.SAVED, resume_from_checkpoint=True)
        measured = {"num_eval_prompts": 1, "logging_steps": 3}  # changes nothing that is learned
        train(**self.SAVED, **measured, resume_from_checkpoint=True, dataset=moved)
        assert_same(train.weights(), uninterrupted)
        state = json.loads((train.output_dir / "checkpoint-4" / "run.json").read_text())
        (train.output_dir / "checkpoint-8" / "run.json").write_text(json.dumps({**state, "num_processes": 2}))
        with pytest.raises(ValueError, match=r"checkpoint-8 .* num_processes 2 \(now 1\)"):
            train(**self.SAVED, resume_from_checkpoint=True, dataset=moved)
        train(**self.SAVED, resume_from_checkpoint=True, resume_with_changes=True, dataset=moved)
        assert "num_processes 2 (now 1): this is no exact resume" in caplog.text


def test_what_is_learned_does_not_depend_on_what_is_measured(train: Runner) -> None:
    """Though both draw random numbers."""
    options = {"head_type": "eagle", "head_overrides": None}
    train(**options)
    weights = train.weights()
    train(**options, eval_strategy="steps", eval_steps=2)
    assert_same(train.weights(), weights)


class TestBestCheckpoint:
    """A huge learning rate: the heads only get worse."""

    WORSE: dict[str, Any] = {  # noqa: RUF012
        "learning_rate": 2.0,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }

    def test_the_best_by_acceptance_length_is_kept_and_on_request_the_result(
        self, train: Runner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lengths = iter([1.5, 2.5, 2.0, 1.0])
        monkeypatch.setattr(AcceptanceMeter, "__call__", lambda _: {"acceptance_length": next(lengths)})
        metrics = train(**self.WORSE, max_steps=4, save_total_limit=2, load_best_model_at_end=True)
        assert metrics["eval_acceptance_length"] == 2.5
        kept = {folder.name for folder in train.output_dir.glob("checkpoint-*")}
        assert kept == {"checkpoint-2", "checkpoint-4"}
        state = json.loads((train.output_dir / "checkpoint-4" / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(train.output_dir / "checkpoint-2")
        best = json.loads((train.output_dir / "checkpoint-2" / "trainer_state.json").read_text())
        assert best["best_model_checkpoint"] == str(train.output_dir / "checkpoint-2")
        assert_same(train.weights(), load_file(train.output_dir / "checkpoint-2" / "model.safetensors"))


# Which checkpoint is resumed: complete ones only, whatever a kill or a full disk left behind.


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    for step in (9, 10, 100):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "optimizer.pt"):
            (folder / name).touch()
        for name in ("trainer_state.json", "run.json"):
            (folder / name).write_text("{}")
    return tmp_path


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


DAMAGES = {
    "no trainer state": (remove("trainer_state.json"), "trainer_state.json is missing"),
    "no weights": (remove("model.safetensors"), "model.safetensors is missing"),
    "no run file": (remove("run.json"), "run.json is missing"),
    "no optimizer": (remove("optimizer.pt"), "optimizer.pt is missing"),
}


@pytest.mark.parametrize(("damage", "found"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    output_dir: Path, damage: Callable[[Path], None], found: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(output_dir / "checkpoint-100")
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(str(output_dir), True) == output_dir / "checkpoint-10"
    (message,) = caplog.messages
    assert "checkpoint-100 is skipped" in message
    assert found in message


def test_an_optimizer_may_be_kept_in_a_folder(output_dir: Path) -> None:
    """DeepSpeed's way."""
    newest = output_dir / "checkpoint-100"
    (newest / "optimizer.pt").unlink()
    (newest / "global_step100").mkdir()
    assert find_damage(newest) is None


def test_the_newest_is_the_one_of_the_highest_step(output_dir: Path) -> None:
    (output_dir / "checkpoint-notes").mkdir()
    assert find_checkpoint(str(output_dir), "True") == output_dir / "checkpoint-100"


def test_a_folder_that_is_asked_for(output_dir: Path, tmp_path: Path) -> None:
    older = output_dir / "checkpoint-9"
    assert find_checkpoint("elsewhere", str(older)) == older
    (older / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"cannot resume from .*checkpoint-9: trainer_state\.json is missing; give"):
        find_checkpoint("elsewhere", str(older))
    with pytest.raises(ValueError, match=r"cannot resume from .*nothing: config\.json is missing"):
        find_checkpoint("elsewhere", str(tmp_path / "nothing"))
