"""`JointTrainer`: `HeadsTrainer` for heads and adapters of their target together
(`draftsmith.training.run.joint_model`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.heads.adapter import FOLDER
from draftsmith.training.losses.draft_loss import LossOutput
from draftsmith.training.run.joint_model import JointModel, JointOutput, find_predicted, load_adapter_weights
from draftsmith.training.run.optimizer import MuonWithAdamW
from draftsmith.training.run.trainer import HeadsTrainer


class JointTrainer(HeadsTrainer):
    """Trains a `JointModel`.

    In the logs `loss` is the minimised sum, `heads_loss` the heads' mean over drafted tokens, and `target_loss` the
    target's. `eval_loss` is the heads' loss, as without adapters.
    """

    logged_metrics = (*HeadsTrainer.logged_metrics, "heads_loss", "target_loss")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.num_groups is not None:  # processes share weights
            raise ValueError(
                "lora_r trains heads and target as one module, which FSDP and ZeRO-3 cannot split: train under DDP, "
                "ZeRO-1 or ZeRO-2"
            )

    @property
    def joint(self) -> JointModel:
        return cast(JointModel, self.model)

    @property
    def heads(self) -> DraftHeads:
        return self.joint.heads

    # Losses.

    @property
    def num_counts(self) -> int:
        return super().num_counts + 1

    def count_predicted(self, batch: dict[str, Any]) -> Tensor:
        """The tokens that the target predicts follow those of the heads' steps."""
        return torch.cat([super().count_predicted(batch), torch.full((1,), len(find_predicted(batch)))])

    def draft_batch(self, model: Any, inputs: dict[str, Tensor], counts: Tensor | None) -> LossOutput:
        is_training = model.training
        of_heads, of_target = (None, None) if counts is None else (counts[:-1], counts[-1])
        output: JointOutput = model(
            inputs,
            draft=partial(self.draft_from, inputs=inputs, heads=self.heads, forward=self.heads, counts=of_heads),
            count=of_target,
        )
        sums, new = self._sums[is_training], torch.stack([output.target_sum, output.target_count.float()])
        sums["target"] = sums["target"] + new if "target" in sums else new
        return replace(output.heads, loss=output.loss)

    def _take_metrics(self, *, is_training: bool) -> dict[str, float]:
        target_sums = self._sums[is_training].pop("target", None)
        metrics = super()._take_metrics(is_training=is_training)
        if target_sums is not None:
            loss, count = self.accelerator.reduce(target_sums, "sum").tolist()
            metrics["target_loss"] = loss / max(count, 1)
        if is_training and metrics:
            metrics["heads_loss"] = metrics.pop("loss")
        return metrics

    # Optimizer and schedule.

    @property
    def heads_learning_rate(self) -> float:
        return self.args.learning_rate * self.joint.args.heads_lr_multiplier

    def make_more_groups(self) -> list[dict[str, Any]]:
        return [
            {
                "params": list(self.joint.adapters),
                "lr": self.args.learning_rate,
                "weight_decay": self.args.weight_decay,
            }
        ]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = self.optimizer
        if optimizer is None:
            optimizer = super().create_optimizer(self.heads)
            if not isinstance(optimizer, MuonWithAdamW):
                for group in optimizer.param_groups:
                    group["lr"] = self.heads_learning_rate
                for group in self.make_more_groups():
                    optimizer.add_param_group(group)
        return optimizer

    # Files.

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            self.heads.save_pretrained(output_dir or str(self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        stored: DraftHeads = DraftHeads.from_pretrained(folder, dtype=torch.float32)
        self.heads.load_state_dict(stored.state_dict())
        load_adapter_weights(self.target.model, folder / FOLDER)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)
