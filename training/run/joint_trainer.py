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
from torch.optim.lr_scheduler import LambdaLR

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

    logged_metrics = (*HeadsTrainer.logged_metrics, "heads_loss", "target_loss", "adapter_learning_rate")
    has_unused_parameters = True  # the adapters, while only the heads learn

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.num_groups is not None:  # processes share weights
            raise ValueError(
                "lora_r trains heads and target as one module, which FSDP and ZeRO-3 cannot split: train under DDP, "
                "ZeRO-1 or ZeRO-2"
            )
        self.num_warmup_steps = 0

    @property
    def joint(self) -> JointModel:
        return cast(JointModel, self.model)

    @property
    def heads(self) -> DraftHeads:
        return self.joint.heads

    @property
    def is_joint(self) -> bool:
        """Whether the warm-up of the heads is over."""
        return self.state.global_step >= self.num_warmup_steps

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
            trains_target=self.is_joint or not is_training,
            count=of_target,
        )
        if output.target_sum is not None and output.target_count is not None:
            sums, new = self._sums[is_training], torch.stack([output.target_sum, output.target_count.float()])
            sums["target"] = sums["target"] + new if "target" in sums else new
        return replace(output.heads, loss=output.loss)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        if not self.is_joint and not self.is_deepspeed_enabled:  # DeepSpeed relies on the learning rate of 0
            for parameter in self.joint.adapters:
                parameter.grad = None  # Adam would count zeros as a step
        return loss

    def _take_metrics(self, *, is_training: bool) -> dict[str, float]:
        target_sums = self._sums[is_training].pop("target", None)
        metrics = super()._take_metrics(is_training=is_training)
        if target_sums is not None:
            loss, count = self.accelerator.reduce(target_sums, "sum").tolist()
            metrics["target_loss"] = loss / max(count, 1)
        if is_training and metrics:
            metrics["heads_loss"] = metrics.pop("loss")
            metrics["adapter_learning_rate"] = float(self._groups[self._adapter_group]["lr"])
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
                "is_adapter": True,
            }
        ]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return cast(torch.optim.Optimizer, self.optimizer).param_groups

    @property
    def _adapter_group(self) -> int:
        return next(place for place, group in enumerate(self._groups) if group.get("is_adapter"))

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

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The requested schedule; the adapters' learning rate is 0 during the heads' warm-up.

        Then the adapters' rate rises to the schedule's, in as many steps as the schedule's own warm-up has.
        """
        self.num_warmup_steps = alone = self.joint.args.num_warmup_steps(num_training_steps)
        if self.lr_scheduler is not None or not alone:
            return super().create_scheduler(num_training_steps, optimizer)
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        assert isinstance(scheduler, LambdaLR)
        place, ramp = self._adapter_group, self.args.get_warmup_steps(num_training_steps)
        factor = scheduler.lr_lambdas[place]

        def delayed_factor(step: int) -> float:
            share = min(1.0, (step - alone) / ramp) if ramp else 1.0
            return share * float(factor(step)) if step >= alone else 0.0

        scheduler.lr_lambdas[place] = delayed_factor
        group = scheduler.optimizer.param_groups[place]
        group["lr"] = scheduler._last_lr[place] = group["initial_lr"] * delayed_factor(0)
        return scheduler

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
