"""What decides which checkpoint is the best, and what learning rates go by: known before the first step, or refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from transformers import EarlyStoppingCallback

from tests.training.runner import InterruptedRunError, Runner, interrupt_at_step
from training.options.command_line import parse_arguments
from training.run.preparation import prepare_run

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def prepare(train: Runner, **options: Any) -> Any:
    return prepare_run(*parse_arguments(train.arguments(**{**EVALUATED, **options}))).trainer


@pytest.mark.parametrize("metric", ["acceptance", "top1_depth3", "eval_target_loss"])
def test_an_unknown_metric_is_refused_at_once(train: Runner, metric: str) -> None:
    known = "acceptance_length, loss, top1_depth1, top5_depth1, top1_depth2, top5_depth2"
    with pytest.raises(ValueError, match=f"got metric_for_best_model {metric}, which .* they have {known}$"):
        prepare(train, metric_for_best_model=metric)


@pytest.mark.parametrize("metric", ["acceptance_length", "eval_loss", "top5_depth2"])
def test_known_metrics_choose(train: Runner, metric: str) -> None:
    train(**EVALUATED, max_steps=2, metric_for_best_model=metric)
    state = json.loads((train.output_dir / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 2


class TestLearningRatesByMetric:
    PLATEAU: dict[str, Any] = {"lr_scheduler_type": "reduce_lr_on_plateau"}  # noqa: RUF012

    @pytest.mark.parametrize(("metric", "mode"), [("acceptance_length", "max"), ("loss", "min")])
    def test_they_fall_when_it_no_longer_gets_better(self, train: Runner, metric: str, mode: str) -> None:
        trainer = prepare(train, **self.PLATEAU, metric_for_best_model=metric)
        trainer.create_optimizer()
        assert trainer.create_scheduler(8).mode == mode

    def test_a_stored_configuration_takes_another_metric(self, train: Runner) -> None:
        train(**EVALUATED, **self.PLATEAU, max_steps=2)
        words = ["--config", str(train.output_dir / "training_config.yaml"), "--metric_for_best_model", "loss"]
        args = parse_arguments(words)[2]
        assert not args.greater_is_better
        assert not args.lr_scheduler_kwargs

    @pytest.mark.parametrize(
        ("changed", "names"),
        [
            ({"metric_for_best_model": "top1_depth1"}, "metric_for_best_model"),
            ({"num_eval_prompts": 1}, "held-out data '2 prompts"),
            ({"eval_max_new_tokens": 4}, "eval_max_new_tokens 8"),
            ({"max_eval_samples": 3}, None),  # of the loss, which decides nothing here
        ],
    )
    def test_what_they_go_by_makes_another_run(self, train: Runner, changed: dict[str, Any], names: str | None) -> None:
        train(**EVALUATED, **self.PLATEAU, max_steps=2)
        with pytest.raises(ValueError, match=names) if names else nullcontext():
            prepare(train, **self.PLATEAU, max_steps=2, resume_from_checkpoint=True, **changed)

    @pytest.mark.parametrize("options", [PLATEAU, {"save_strategy": "best"}])
    def test_without_prompts_there_is_nothing_to_go_by(self, train: Runner, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="there is no prompt to measure it on"):
            prepare(train, **options, num_eval_prompts=0)


def test_a_resumed_run_evaluates_as_often_as_its_options_say(train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_at_step(5, patch)
        with pytest.raises(InterruptedRunError):
            train(**EVALUATED, max_steps=9)
    train(**{**EVALUATED, "eval_steps": 3, "save_steps": 3}, max_steps=9, resume_from_checkpoint=True)
    state = json.loads((train.output_dir / "checkpoint-9" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [2, 4, 6, 9]


def test_a_resumed_run_is_as_patient_as_its_options_say(train: Runner) -> None:
    """And goes on counting where the interrupted one was."""
    often = {**EVALUATED, "eval_steps": 1, "save_steps": 1, "max_steps": 6, "metric_for_best_model": "loss"}
    often["greater_is_better"] = True  # so that learning counts as getting worse
    train(**often, early_stopping_patience=5)
    trainer = prepare(train, **often, early_stopping_patience=9, resume_from_checkpoint=True)
    state = json.loads((train.output_dir / "checkpoint-6" / "trainer_state.json").read_text())
    trainer.state.stateful_callbacks = state["stateful_callbacks"]
    counted = state["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"]
    trainer._load_callback_state()
    (stopper,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback))
    assert (stopper.early_stopping_patience, stopper.early_stopping_patience_counter) == (9, counted)
    assert counted > 0


def test_weights_of_each_depth_are_counted_before_the_first_step(train: Runner) -> None:
    with pytest.raises(ValueError, match="got 3 depth_weights for heads that are trained over 2 drafting steps"):
        prepare(train, depth_weights="1,0.5,0.2")
