"""HeadsTrainer: transformers' Trainer for draft heads on features of a frozen target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from heads import DraftHeads
from inference.target import Target
from training.losses import LossOutput, compute_teacher, draft_loss
from training.optimizer import MuonWithAdamW


class HeadsTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """Trains heads; the target only computes features, online, without gradients.

    Args:
        target: the frozen target the heads are bound to.
        loss_type: see `training.losses.draft_loss`.
        step_decay: weight of depth k is step_decay^k.
        measure_acceptance: called at every evaluation; returns metrics (such as `acceptance_length`) measured by
            decoding held-out prompts with the heads as they are.
        muon_learning_rate: trains hidden matrices with Muon (`training.optimizer`); None = AdamW for all.
        **kwargs: those of `transformers.Trainer`.
    """

    def __init__(
        self,
        *,
        target: Target,
        loss_type: str,
        step_decay: float,
        measure_acceptance: Callable[[], dict[str, float]] | None = None,
        muon_learning_rate: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.muon_learning_rate = muon_learning_rate
        self.target = target
        self.loss_type = loss_type
        self.step_decay = step_decay
        self.measure_acceptance = measure_acceptance
        # Says that `compute_loss` has already divided by what `get_batch_samples` counted.
        self.model_accepts_loss_kwargs = True
        self.accelerator.gradient_accumulation_steps = 1  # older releases have accelerate divide once more
        self._sums: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}  # of training and of evaluation batches

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.muon_learning_rate is None:
            return super().create_optimizer(model)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                f"got muon_learning_rate {self.muon_learning_rate} under DeepSpeed or FSDP: Muon needs whole matrices, "
                "which these cut up; leave it out, or train with plain DDP"
            )
        if self.optimizer is None:
            self.optimizer = MuonWithAdamW(
                cast(nn.Module, self.model if model is None else model).named_parameters(),
                muon_learning_rate=self.muon_learning_rate,
                learning_rate=self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                weight_decay=self.args.weight_decay,
            )
        return self.optimizer

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The batches of one optimizer step, and how many tokens they predict, those of all processes together."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        count = torch.zeros((), dtype=torch.long, device=device)
        for batch in batches:
            count += batch["loss_mask"].sum().to(device)
        return batches, cast(Tensor, self.accelerator.reduce(count, reduction="sum"))

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The batch's mean loss; in training, weighed by its share of the tokens that the optimizer step predicts.

        Accumulated and distributed batches so add up to the mean over all of them: to the very mean where every step
        has a loss on each predicted token. Tokens outside a reduced draft vocabulary, and those too near the start for
        the deeper steps, count in the shares all the same.
        """
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
        output: LossOutput = model(
            encoded.features, inputs["input_ids"], loss_fn=loss_fn, loss_mask=inputs["loss_mask"]
        )
        self._add_metrics(output, is_training=model.training)
        loss = output.loss
        if num_items_in_batch is not None:
            share = inputs["loss_mask"].sum() / num_items_in_batch.clamp(min=1)
            loss = loss * share * self.accelerator.num_processes  # whose gradients are averaged
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Evaluation needs the loss and our own metrics; nothing of size [B, T, V] is gathered."""
        inputs = self._prepare_inputs(inputs)
        dataloader = self.accelerator.gradient_state
        if dataloader.end_of_dataloader and dataloader.remainder > 0:
            # To give each process as many rows, accelerate has filled the last batches up with rows of the first.
            rows_B = torch.arange(len(inputs["loss_mask"]), device=inputs["loss_mask"].device)
            is_own_B = rows_B + self.args.process_index * len(rows_B) < dataloader.remainder
            inputs["loss_mask"] = inputs["loss_mask"] * is_own_B[:, None]
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Adds our metrics before anyone reads them: the logs, early stopping, the choice of the best checkpoint.

        Those are the per-depth accuracies, the loss as one mean over all positions (Trainer's own is the mean of batch
        means, and so depends on the batch size), and the acceptance length measured by decoding.
        """
        kwargs["metric_key_prefix"] = metric_key_prefix
        output = super().evaluation_loop(*args, **kwargs)
        metrics = self._take_metrics(is_training=False)
        if self.measure_acceptance is not None:
            metrics.update(self.measure_acceptance())
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs = {**logs, **{k: v for k, v in self._take_metrics(is_training=True).items() if k.startswith("top1")}}
        super().log({k: round(v, 4) if "top" in k else v for k, v in logs.items()}, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As transformers', which writes `trainer_state.json` last; an older one of the same name must not make a
        half-written checkpoint look complete (see `training.resume`)."""
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            (folder / "trainer_state.json").unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _add_metrics(self, output: LossOutput, *, is_training: bool) -> None:
        sums = self._sums[is_training]
        for name in ("loss_sums", "loss_counts", "top1", "top5", "positions"):
            values = torch.stack(getattr(output, name)).detach()
            sums[name] = sums[name] + values if name in sums else values

    def _take_metrics(self, *, is_training: bool) -> dict[str, float]:
        """Averages since the last call, over all processes; depth 1 = the first drafted token."""
        sums = self._sums[is_training]
        if not sums:
            return {}
        wide = torch.float32 if self.args.device.type == "mps" else torch.float64
        total = {name: self.accelerator.reduce(value.to(wide), "sum").tolist() for name, value in sums.items()}
        sums.clear()
        metrics = {"loss": 0.0}
        for k, positions in enumerate(total["positions"]):
            metrics["loss"] += self.step_decay**k * total["loss_sums"][k] / max(total["loss_counts"][k], 1)
            metrics[f"top1_depth{k + 1}"] = total["top1"][k] / max(positions, 1)
            metrics[f"top5_depth{k + 1}"] = total["top5"][k] / max(positions, 1)
        return metrics
