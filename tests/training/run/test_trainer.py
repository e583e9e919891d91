"""HeadsTrainer: what an evaluation reports, and to whom, and what a run writes (test_splits.py: how batches add up)."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.inference import Target
from draftsmith.training.data.collation import ConversationCollator
from draftsmith.training.features.encoding import encode
from draftsmith.training.losses.draft_loss import draft_loss
from draftsmith.training.losses.teacher import compute_teacher
from draftsmith.training.options.training_options import HeadsTrainingArguments
from draftsmith.training.run.trainer import HeadsTrainer
from tests.tiny_targets import random_prompt

Rows = list[dict[str, list[int]]]


def make_rows(lengths: list[tuple[int, int]], seed: int = 0) -> Rows:
    """Rows of (prompt tokens, reply tokens)."""
    return [
        {
            "input_ids": random_prompt(prompt + reply, seed=seed + index)[0].tolist(),
            "loss_mask": [0] * prompt + [1] * reply,
        }
        for index, (prompt, reply) in enumerate(lengths)
    ]


# As different as they get: the mean of the batches' means is far from the mean over all tokens.
UNEVEN = [(9, 30), (11, 3), (15, 9), (10, 1), (9, 16)]


def make_heads(target: Target, head_type: str, **overrides: Any) -> DraftHeads:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        heads = create_heads(head_type, target, **overrides)
    if heads.wants_token_counts:
        heads.fit_vocabulary(torch.arange(target.vocab_size))
    return heads


def make_trainer(
    target: Target, heads: DraftHeads, output_dir: Path, rows: Rows, *, eval_rows: Rows | None = None, **options: Any
) -> HeadsTrainer:
    ours = {name: options.pop(name) for name in ("measure_acceptance", "callbacks") if name in options}
    defaults = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "num_train_epochs": 1,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_grad_norm": 0.0,
        "step_decay": None if "depth_weights" in options else 0.8,
    }
    return HeadsTrainer(
        target=target,
        model=heads,
        args=HeadsTrainingArguments(**{**defaults, **options}),
        train_dataset=rows,
        eval_dataset=eval_rows,
        data_collator=ConversationCollator(0),
        **ours,
    )


def mean_loss(target: Target, heads: DraftHeads, rows: Rows, step_decay: float = 0.8, **options: Any) -> Tensor:
    """The loss of rows as one batch."""
    batch = ConversationCollator(0)(rows)
    encoded = encode(target, batch["input_ids"], batch["attention_mask"], feature_layers=heads.feature_layers)
    teacher = compute_teacher(
        target,
        encoded.last_hidden,
        batch["input_ids"],
        batch["loss_mask"],
        heads.draft_token_ids,
        loss_type=heads.default_loss,
    )
    steps = heads.unroll(encoded.features, batch["input_ids"])
    return draft_loss(
        steps, teacher, batch["loss_mask"], loss_type=heads.default_loss, step_decay=step_decay, **options
    ).loss


def test_a_batch_without_predicted_tokens(target: Target, tmp_path: Path) -> None:
    rows = make_rows([(4, 3)])
    rows[0]["loss_mask"] = [0] * 7
    heads = make_heads(target, "medusa")
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    trainer = make_trainer(target, heads, tmp_path, rows, optim="sgd")
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in heads.state_dict().items())


class TestEvaluation:
    @pytest.mark.parametrize(("head_type", "batch_size"), [("medusa", 1), ("eagle3", 2), ("medusa", 5)])
    def test_is_one_mean_whatever_the_batch_size(
        self, target: Target, head_type: str, batch_size: int, tmp_path: Path
    ) -> None:
        heads = make_heads(target, head_type)
        rows = make_rows(UNEVEN)
        trainer = make_trainer(
            target, heads, tmp_path, [], eval_rows=rows, per_device_eval_batch_size=batch_size, step_decay=0.7
        )
        metrics = trainer.evaluate()
        depths = len(heads.unroll(torch.zeros(1, 9, 32 * len(heads.feature_layers)), random_prompt(9)))
        mean = mean_loss(target, heads, rows, 0.7).item() / sum(0.7**depth for depth in range(depths))
        assert metrics["eval_loss"] == pytest.approx(mean, rel=1e-4)
        for depth in range(1, depths + 1):
            top1, top5 = metrics[f"eval_top1_depth{depth}"], metrics[f"eval_top5_depth{depth}"]
            assert 0 <= top1 <= top5 <= 1
        assert f"eval_top1_depth{depths + 1}" not in metrics

    def test_heads_measure_in_eval_mode_and_go_on_in_training_mode(self, target: Target, tmp_path: Path) -> None:
        heads = make_heads(target, "medusa")
        modes = []

        def measure() -> dict[str, float]:
            modes.append(heads.training)
            return {"acceptance_length": 1.0}

        class NoteMode(TrainerCallback):
            def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                modes.append(heads.training)

        trainer = make_trainer(
            target,
            heads,
            tmp_path,
            make_rows(UNEVEN[:2]),
            eval_rows=make_rows(UNEVEN),
            per_device_train_batch_size=1,
            eval_strategy="steps",
            eval_steps=1,
            measure_acceptance=measure,
            callbacks=[NoteMode()],
        )
        trainer.train()
        assert modes == [True, False, True, False]


def test_bfloat16_computes_in_it_and_keeps_float32_weights(target: Target, tmp_path: Path) -> None:
    heads = make_heads(target, "eagle3")
    rows = make_rows(UNEVEN)
    expected = mean_loss(target, heads, rows).item() / sum(0.8**depth for depth in range(heads.num_unrolled_steps))
    trainer = make_trainer(target, heads, tmp_path, rows, per_device_train_batch_size=5, bf16=True)
    trainer.train()
    found = trainer.state.log_history[0]["loss"]
    assert found == pytest.approx(expected, rel=0.02)
    assert found != pytest.approx(expected, rel=1e-6), "nothing was computed in bfloat16"
    assert heads.dtype == torch.float32
    assert math.isfinite(trainer.state.log_history[0]["grad_norm"])


def test_a_checkpoint_that_is_written_again_is_the_old_one_until_the_new_one_is_whole(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = make_heads(target, "medusa")
    rows = make_rows(UNEVEN[:1])
    options = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 0.1, "warmup_steps": 0}
    make_trainer(target, heads, tmp_path, rows, **options).train()
    before = {file.name: file.read_bytes() for file in (tmp_path / "checkpoint-1").iterdir()}
    trainer = make_trainer(target, heads, tmp_path, rows, **options)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_save_rng_state", lambda folder: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "checkpoint-1").iterdir()} == before
    make_trainer(target, heads, tmp_path, rows, **options).train()
    assert (tmp_path / "checkpoint-1" / "model.safetensors").read_bytes() != before["model.safetensors"]
