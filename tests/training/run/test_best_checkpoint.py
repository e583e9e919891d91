"""What decides which checkpoint is the best, and what learning rates go by: known before the first step, or refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from draftsmith.training.run.checkpoints import remove_old
from tests.training.runner import Runner

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def prepare(train: Runner, **options: Any) -> Any:
    return train.prepare(**{**EVALUATED, **options}).trainer


def test_without_prompts_there_is_nothing_to_go_by(train: Runner) -> None:
    with pytest.raises(ValueError, match="no prompt to measure it"):
        prepare(train, save_strategy="best", num_eval_prompts=0)
    assert prepare(train, num_eval_prompts=0).args.metric_for_best_model is None  # nothing reads it
    with pytest.raises(ValueError, match="lr_scheduler_type reduce_lr_on_plateau"):
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


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("best", [None, 1, 3])
def test_the_newest_stay_and_the_best_one(limit: int, best: int | None, tmp_path: Path) -> None:
    for step in range(1, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (step, step))
        is_known = best is not None and best <= step
        remove_old(tmp_path, save_total_limit=limit, best=str(tmp_path / f"checkpoint-{best}") if is_known else None)
        kept = sorted(int(folder.name.rpartition("-")[2]) for folder in tmp_path.glob("checkpoint-*"))
        number = min(step, max(limit, 2 if is_known and best != step else 1))
        newest = [one for one in range(1, step + 1) if not is_known or one != best]
        rest = number - (1 if is_known else 0)
        assert kept == sorted([*([best] if is_known and best else []), *newest[len(newest) - rest :]])
