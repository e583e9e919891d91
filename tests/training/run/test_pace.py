"""How long a run takes: measured before it begins, without a trace, and fitted to a time budget."""

import json
import logging
from typing import Any

import pytest
import torch

from draftsmith.training.run import pace as pace_module
from draftsmith.training.run import preparation
from draftsmith.training.run.pace import FEWEST_STEPS, Pace, measure_pace
from draftsmith.training.run.trainer import HeadsTrainer
from tests.training.runner import Runner, assert_same

SLOW = Pace(tokens_per_second=370, tokens_per_step=12288, num_steps=6545)  # EAGLE-3 for a target of 135 M on one core


def test_a_measurement_leaves_no_trace(train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients, random numbers and the run's result are those without it."""
    found: list[Pace] = []

    def measured(trainer: HeadsTrainer, *rest: Any) -> Pace:
        before = torch.get_rng_state()
        found.append(measure_pace(trainer, *rest))
        assert torch.equal(before, torch.get_rng_state())
        assert all(parameter.grad is None for parameter in trainer.heads.parameters())
        return found[-1]

    monkeypatch.setattr(pace_module, "MEASURED_SECONDS", 0.5)
    monkeypatch.setattr(preparation, "measure_pace", measured)
    options = {"head_type": "eagle", "head_overrides": None, "gradient_accumulation_steps": 2}  # draws noise
    train(**options)
    weights = train.weights()
    monkeypatch.setattr(Pace, "fit", lambda *_: 8)
    train(**options, time_budget="1h", max_steps=-1, num_train_epochs=3)
    assert_same(weights, train.weights())
    assert found[0].num_steps == 9  # 18 rows, 8 in a step, 3 times
    assert found[0].tokens_per_second > 0
    assert 8 * 15 < found[0].tokens_per_step < 8 * 40


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_steps_are_measured_as_they_will_run(train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whose states are computed again, and the optimizer."""
    seen: list[Any] = []

    def measured(trainer: HeadsTrainer, *rest: Any) -> Pace:
        heads: Any = trainer.heads

        def time_batch(*_: Any) -> float:
            seen.append(heads.midlayer.gradient_checkpointing)
            return 1e3

        monkeypatch.setattr(pace_module, "_time_batch", time_batch)
        before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
        fast = measure_pace(trainer, *rest)
        monkeypatch.setattr(pace_module, "_time_optimizer", lambda *_: 2.0)
        slow = measure_pace(trainer, *rest)
        assert slow.seconds == pytest.approx(slow.num_steps * (slow.tokens_per_step / 1e3 + 2.0))
        assert slow.tokens_per_second < fast.tokens_per_second < 1e3
        assert_same(before, heads.state_dict())
        assert trainer.optimizer is None
        return slow

    monkeypatch.setattr(pace_module, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(preparation, "measure_pace", measured)
    train(gradient_checkpointing=True, muon_learning_rate=0.02, time_budget="1h", max_steps=-1, num_train_epochs=1)
    assert seen
    assert all(seen)


def test_a_long_row_is_shortened_to_whole_documents() -> None:
    row = {"input_ids": [*range(700)], "loss_mask": [1] * 700, "document_lengths": [300, 200, 200]}
    short = pace_module._shorten(row)
    assert (len(short["input_ids"]), len(short["loss_mask"]), short["document_lengths"]) == (500, 500, [300, 200])
    assert len(pace_module._shorten(row | {"document_lengths": [600, 100]})["input_ids"]) == 600
    assert pace_module._shorten({"input_ids": [1], "loss_mask": [1]}) == {"input_ids": [1], "loss_mask": [1]}


def test_steps_that_fit(train: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The run ends after them, with its learning rate at the end of its schedule; a resumed run has as many."""
    monkeypatch.setattr(preparation, "measure_pace", lambda *_: Pace(1000, 1000, 60))
    budget = {"time_budget": "30s", "max_steps": -1, "num_train_epochs": 99, "save_strategy": "steps", "save_steps": 10}
    with caplog.at_level(logging.INFO):
        train.break_off(20, **budget)
    assert "27 steps" in caplog.text
    monkeypatch.setattr(preparation, "measure_pace", lambda *_: pytest.fail("measured again"))
    train(**budget, resume_from_checkpoint=True)
    record = json.loads((train.output_dir / "training_record.json").read_text())
    assert record["training"]["steps"] == 27


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_budget": "2 hours"}, "got time_budget '2 hours'.*90m or 2h"),
        ({"time_budget": "2h", "streaming": True}, "got time_budget 2h with streaming True: "),
    ],
)
def test_budgets_that_cannot_be_kept(train: Runner, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(**options)


def test_a_refused_budget_leaves_no_folder(train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "measure_pace", lambda *_: SLOW)
    folder = train.output_dir / "new" / "heads"
    options = {"time_budget": "60s", "max_steps": -1, "num_train_epochs": 1, "output_dir": folder}
    with pytest.raises(ValueError, match="heads need at least"):
        train(**options)
    assert not folder.parent.exists()
    folder.mkdir(parents=True)  # one that was there stays
    with pytest.raises(ValueError, match="heads need at least"):
        train(**options)
    assert folder.exists()


def test_the_numbers() -> None:
    assert SLOW.fit(2 * 3600) == 195
    assert Pace(370, 12288, 100).fit(2 * 3600) == 100, "the options ask for less"
    with pytest.raises(ValueError, match=f"1 steps fit, .* at least {FEWEST_STEPS}: "):
        SLOW.fit(60)
    words = SLOW.describe()
    for part in (
        "370 tokens/s",
        "80.4 M tokens",
        "6,545 steps",
        "60.4 hours",
        "above 2.3",
        "--time_budget 2h",
        "2.4 M",
    ):
        assert part in words
    assert "--time_budget" not in Pace(370, 12288, 100).describe()
