"""The loss and the gradient of an optimizer step do not depend on how it is split: into accumulated batches, among
processes (tests/training/distributed/test_splits_of_processes.py), or into packed rows."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from draftsmith.heads import HEAD_TYPES
from draftsmith.inference import Target
from tests.params import slow_but
from tests.training.run.test_trainer import Rows, make_heads, make_rows, make_trainer

# Prompts and replies as uneven as they get: the mean of the batches' means is far from the mean over all tokens, deep
# steps predict in one row only, and that row has more slots than `FEW_ANCHORS`.
ROWS = make_rows([(9, 1), (11, 2), (15, 1), (10, 1), (9, 30), (8, 1), (12, 5), (9, 1)])
FEW_ANCHORS = 3
DSPARK = {"predicts_at_anchor": True, "markov_rank": 6, "has_confidence": True}
# Name -> kind of heads, its settings, and options of training.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{kind: (kind, {}, {}) for kind in HEAD_TYPES},
    "block-anchors": ("block", {"num_anchors": FEW_ANCHORS}, {}),
    "block-d_pace": ("block", {"num_anchors": FEW_ANCHORS}, {"depth_weights": "d_pace"}),
    "block-distillation": ("block", DSPARK, {"loss_type": "distillation"}),
    "block-mixture": ("block", DSPARK, {"loss_type": "1.8*total_variation+0.1*cross_entropy"}),
    "eagle-smooth_l1": ("eagle", {"ttt_steps": 3}, {"loss_type": "smooth_l1+0.1*distillation"}),
    "eagle3-vocabulary": ("eagle3", {"draft_vocab_size": 40}, {}),
    "eagle3-labels": ("eagle3", {"draft_vocab_size": 40}, {"loss_type": "cross_entropy"}),
    "parallel-vocabulary": ("parallel", {"draft_vocab_size": 40, "num_depths": 5}, {"depth_weights": "d_pace"}),
}
QUICK = {"eagle", "block-anchors", "eagle3-vocabulary"}


class Result(NamedTuple):
    """The losses and gradient norms of the steps, and the weights after them."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def train(target: Target, name: str, rows: Rows, batch_size: int, accumulation: int, folder: Path) -> Result:
    kind, overrides, options = CASES[name]
    heads = make_heads(target, kind, **overrides)
    trainer = make_trainer(
        target,
        heads,
        folder,
        rows,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        optim="sgd",
        learning_rate=0.01,
        **options,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == trainer.state.global_step
    weights = {name: weight.detach().clone() for name, weight in heads.state_dict().items()}
    return Result([entry["loss"] for entry in logged], [float(entry["grad_norm"]) for entry in logged], weights)


def pack(rows: Rows) -> dict[str, list[int]]:
    """One row of several documents."""
    joined = {name: [value for row in rows for value in row[name]] for name in rows[0]}
    return {**joined, "document_lengths": [len(row["input_ids"]) for row in rows]}


def assert_same_step(found: Result, expected: Result, case: str) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-4), case
    assert found.norms == pytest.approx(expected.norms, rel=1e-3), case
    for name, weight in expected.weights.items():
        torch.testing.assert_close(
            found.weights[name], weight, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{case}, {name}: {text}"
        )


@pytest.mark.parametrize("name", slow_but(QUICK, list(CASES)))
def test_equals_one_big_batch(target: Target, name: str, tmp_path: Path) -> None:
    """Twelve rows: the second optimizer step has four of them, and fewer batches than the first."""
    more = [*ROWS, *make_rows([(9, 4), (7, 12), (12, 6), (8, 9)], seed=40)]
    expected = train(target, name, more, 8, 1, tmp_path)
    assert len(expected.losses) == 2
    untrained = make_heads(target, CASES[name][0], **CASES[name][1]).state_dict()
    assert any(not torch.equal(weight, untrained[key]) for key, weight in expected.weights.items())
    assert_same_step(train(target, name, more, 1, 8, tmp_path), expected, name)
    expected = train(target, name, ROWS, 8, 1, tmp_path)
    packed = [pack(ROWS[:3]), pack(ROWS[3:])]
    assert_same_step(train(target, name, packed, 1, 2, tmp_path), expected, f"{name}, packed")


@pytest.mark.parametrize("name", ["block-anchors", "parallel", "eagle"])
def test_choices_are_random(target: Target, name: str, tmp_path: Path) -> None:
    """They differ from seed to seed and from step to step."""
    kind, overrides, _ = CASES[name]
    found = []
    for seed in (0, 1):
        trainer = make_trainer(target, make_heads(target, kind, **overrides), tmp_path, ROWS, seed=seed)
        for step in (0, 1):
            trainer.state.global_step = step
            batch = trainer.data_collator(ROWS)
            trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
            found.append(trainer.draft_batch(trainer.heads.train(), batch, None).loss.item())
    assert len(set(found)) == len(found)
