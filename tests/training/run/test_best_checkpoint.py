"""What decides which checkpoint is the best, and what learning rates go by: known before the first step, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.training.runner import Runner

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def prepare(train: Runner, **options: Any) -> Any:
    return train.prepare(**{**EVALUATED, **options}).trainer


def test_without_prompts_there_is_nothing_to_go_by(train: Runner) -> None:
    with pytest.raises(ValueError, match="there is no prompt to measure it on"):
        prepare(train, save_strategy="best", num_eval_prompts=0)
    assert prepare(train, num_eval_prompts=0).args.metric_for_best_model is None  # nothing reads it
    with pytest.raises(ValueError, match="which follows a metric: give one of the steps"):
        prepare(train, lr_scheduler_type="reduce_lr_on_plateau")


@pytest.mark.parametrize(
    ("options", "strategy", "every", "is_best_kept"),
    [
        ({}, "steps", 2, True),
        ({"save_strategy": "best"}, "steps", 2, True),
        ({"eval_steps": 3}, "steps", 3, False),
        ({"eval_strategy": "no"}, "no", None, False),
        ({"num_eval_prompts": 0}, "no", None, False),
        ({"num_eval_prompts": 0, "metric_for_best_model": "loss"}, "steps", 2, True),
    ],
)
def test_every_checkpoint_is_evaluated(
    options: dict[str, Any], strategy: str, every: float | None, is_best_kept: bool, train: Runner
) -> None:
    """Where there is something to go by."""
    trainer = prepare(train, **{"eval_strategy": None, "eval_steps": None, **options})
    assert trainer.args.eval_strategy == strategy
    assert strategy != "steps" or trainer.args.eval_steps == every
    assert trainer.args.load_best_model_at_end is is_best_kept


def test_a_metric_that_no_evaluation_has_is_refused(train: Runner) -> None:
    metric = "top1_depth3"
    allowed = "loss, top1_depth1, top1_depth2, top5_depth1, top5_depth2, acceptance_length"
    with pytest.raises(ValueError, match=f"got metric_for_best_model {metric}, .*: give one of {allowed}$"):
        prepare(train, metric_for_best_model=metric)
    assert prepare(train, metric_for_best_model="eval_top1_depth2")


def test_a_resumed_run_evaluates_as_often_as_its_options_say(train: Runner) -> None:
    train.break_off(5, **EVALUATED, max_steps=9)
    train(**{**EVALUATED, "eval_steps": 3, "save_steps": 3}, max_steps=9, resume_from_checkpoint=True)
    state = json.loads((train.output_dir / "checkpoint-9" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [2, 4, 6, 9]
