"""HeadsTrainer: transformers' Trainer for draft heads on features of a frozen target."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Trainer

from heads import DraftHeads
from inference.target import Target
from training.losses import LossOutput, compute_teacher, draft_loss

logger = logging.getLogger(__name__)


class HeadsTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """Trains heads; the target only computes features, online, without gradients.

    Args:
        target: the frozen target the heads are bound to.
        loss_type: see `training.losses.draft_loss`.
        step_decay: weight of depth k is step_decay^k.
        measure_acceptance: called at every evaluation; returns metrics (such as `acceptance_length`) measured by
            decoding held-out prompts with the heads as they are.
        **kwargs: those of `transformers.Trainer`.
    """

    def __init__(
        self,
        *,
        target: Target,
        loss_type: str,
        step_decay: float,
        measure_acceptance: Callable[[], dict[str, float]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.target = target
        self.loss_type = loss_type
        self.step_decay = step_decay
        self.measure_acceptance = measure_acceptance
        self._sums: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        heads: DraftHeads = self.accelerator.unwrap_model(model)
        encoded = self.target.encode(inputs["input_ids"], inputs["attention_mask"], feature_layers=heads.feature_layers)
        teacher = compute_teacher(
            self.target,
            encoded.last_hidden,
            inputs["input_ids"],
            inputs["loss_mask"],
            heads.draft_token_ids,
            loss_type=self.loss_type,
        )
        loss_fn = partial(
            draft_loss,
            teacher=teacher,
            loss_mask=inputs["loss_mask"],
            loss_type=self.loss_type,
            step_decay=self.step_decay,
        )
        output: LossOutput = model(encoded.features, inputs["input_ids"], loss_fn=loss_fn)
        self._add_metrics(output, is_training=model.training)
        return (output.loss, {}) if return_outputs else output.loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Evaluation needs the loss and our own metrics; nothing of size [B, T, V] is gathered."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def _add_metrics(self, output: LossOutput, *, is_training: bool) -> None:
        sums = self._sums[is_training]
        for name in ("loss_sums", "loss_counts", "top1", "top5", "positions"):
            values = torch.stack(getattr(output, name)).detach()
            sums[name] = sums[name] + values if name in sums else values

    def _take_metrics(self, *, is_training: bool) -> dict[str, float]:
        """Per-depth averages since the last call, over all processes; depth 1 = the first drafted token."""
        sums = self._sums[is_training]
        if not sums:
            return {}
        total = {
            name: self.accelerator.gather(
                value[None].to(torch.float64 if value.device.type != "mps" else torch.float32)
            )
            .sum(0)
            .tolist()
            for name, value in sums.items()
        }
        sums.clear()
        metrics = {}
        for k, count in enumerate(total["positions"]):
            metrics[f"top1_depth{k + 1}"] = total["top1"][k] / max(count, 1)
            metrics[f"top5_depth{k + 1}"] = total["top5"][k] / max(count, 1)
        return metrics

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs = {**logs, **{k: v for k, v in self._take_metrics(is_training=True).items() if k.startswith("top1")}}
        super().log(
            {k: round(v, 4) if k.startswith(("top", "eval_top")) else v for k, v in logs.items()}, *args, **kwargs
        )

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Loss, per-depth top-1 and top-5 accuracy, and the acceptance length measured by decoding."""
        self._sums[False].clear()
        kwargs["metric_key_prefix"] = metric_key_prefix
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        extra = defaultdict(float, self._take_metrics(is_training=False))
        if self.measure_acceptance is not None:
            heads = cast(DraftHeads, self.model)
            was_training = heads.training
            heads.eval()
            extra.update(self.measure_acceptance())
            heads.train(was_training)
        named = {f"{metric_key_prefix}_{name}": value for name, value in extra.items()}
        self.log(named)
        metrics.update(named)
        return metrics
