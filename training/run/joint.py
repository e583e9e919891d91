"""Joint training of heads and target, for any kind of heads; with Medusa heads it is Medusa-2 (arXiv 2401.10774).

The target gets LoRA adapters and two losses. Its own loss keeps the target as it is: the KL divergence to itself
without adapters (section 2.3.2), or the language modelling loss on the data (section 2.2.2). The gradient of the heads'
loss flows through the states that the heads read.

Legend: B batch, T sequence length, P positions whose next token is predicted, D hidden size, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draftsmith.heads import DraftHeads
from draftsmith.heads.adapter import FOLDER, WEIGHTS_FILE, load_adapter
from draftsmith.heads.modules.host_tensors import read_on_host, send
from draftsmith.inference.targets.target import Target
from draftsmith.training.data.collation import find_documents
from draftsmith.training.features.encoding import TargetStates, recomputing_layers
from draftsmith.training.features.sources import OnlineFeatures
from draftsmith.training.losses.draft_loss import LossOutput
from draftsmith.training.losses.teacher import rows_per_chunk
from draftsmith.training.options.training_options import JointArguments
from draftsmith.training.run.optimizer import MuonWithAdamW
from draftsmith.training.run.trainer import HeadsTrainer


@dataclass
class JointOutput:
    """The losses of a batch: the minimised sum, and the heads' loss by depth.

    Attributes:
        target_sum: the target's loss summed over the P predicted positions, detached.
        target_count: P.
    """

    loss: Tensor
    heads: LossOutput
    target_sum: Tensor
    target_count: Tensor


class JointModel(nn.Module):
    """Heads and the LoRA adapters of their target (a PEFT model) as one module, whose `forward` computes both losses.

    So the hooks of DDP and ZeRO see every trained parameter, and no frozen one.
    """

    def __init__(self, heads: DraftHeads, target: Target, args: JointArguments) -> None:
        super().__init__()
        self.heads = heads
        self.adapters = nn.ParameterList(
            parameter for parameter in target.model.parameters() if parameter.requires_grad
        )
        self.args = args
        self._target = [target]  # in a list, hidden from nn.Module, which would save and move the target
        self._features = OnlineFeatures(target, heads.feature_layers, with_autograd=True)
        self._is_checkpointing = False
        heads.belong_to_adapter(target.model)

    @property
    def target(self) -> Target:
        return self._target[0]

    @property
    def config(self) -> Any:
        """The heads' configuration, which Trainer's integrations report."""
        return self.heads.config

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Keeps only the inputs of the target's layers and runs the layers again in the backward pass. For Trainer.

        Raises:
            ValueError: any setting is given.
        """
        kwargs = activation_checkpointing_kwargs or {}
        if kwargs not in ({}, {"use_reentrant": False}) or every_n_layers != 1 or offload:
            settings = {**kwargs, "every_n_layers": every_n_layers, "offload": offload}
            raise ValueError(
                f"got activation_checkpointing_kwargs {settings}: with lora_r all layers of the target run again, "
                "without reentrance; leave them out"
            )
        self._is_checkpointing = True

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """The name in older releases of transformers."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs)

    def train(self, mode: bool = True) -> JointModel:
        """Switches the heads and the adapters' dropout; the target stays in evaluation mode, as in decoding."""
        super().train(mode)
        for name, module in self.target.model.named_modules():
            if "lora_dropout" in name:
                module.training = mode
        return self

    def forward(
        self,
        batch: Mapping[str, Tensor],
        draft: Callable[[TargetStates], LossOutput],
        count: Tensor | None = None,
    ) -> JointOutput:
        """The losses of one batch.

        Args:
            draft: the heads' loss on the target's states; it runs `self.heads`.
            count: the positions over which the target's loss is the mean, where the batch is a part of a larger one;
                None = those of the batch.
        """
        reference = None
        if self.args.target_loss == "self_distillation":
            with torch.no_grad(), self.target.model.disable_adapter():
                reference = self._features(batch).last_hidden
        with recomputing_layers(self.target) if self._is_checkpointing else nullcontext():
            states = self._features(batch)
        output = draft(states)
        total, own_count = target_loss(self.target, states.last_hidden, reference, batch)
        mean = total / (own_count if count is None else count).clamp(min=1)
        return JointOutput(mean + self.args.loss_weight * output.loss, output, total.detach(), own_count)


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
        args, adapters = self.args, list(self.joint.adapters)
        return [{"params": adapters, "lr": args.learning_rate, "weight_decay": args.weight_decay}]

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


def find_predicted(batch: Mapping[str, Any]) -> Tensor:
    """[P] int64 on the host: the positions of a batch whose next token is predicted, as b * T + t."""
    is_predicted_BT = F.pad(read_on_host(batch["loss_mask"])[:, 1:], (0, 1)).bool()
    if (documents := find_documents(batch)) is not None:
        is_predicted_BT &= F.pad(documents.values[:, 1:], (0, 1), value=-1) == documents.values
    return is_predicted_BT.flatten().nonzero()[:, 0]


def target_loss(
    target: Target, last_hidden: Tensor, reference: Tensor | None, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The target's own loss, summed over the P positions whose next token is predicted, and P.

    Args:
        last_hidden: [B, T, D] post-norm, with gradients.
        reference: [B, T, D] states without adapters: the loss is KL(without adapters || with adapters). None = the loss
            is the cross-entropy to the data's next token.
    """
    places_P = send(find_predicted(batch), last_hidden.device)
    hidden_PD = last_hidden.flatten(0, 1)[places_P]
    if reference is not None:
        wanted = reference.flatten(0, 1)[places_P]
    else:
        wanted = batch["input_ids"].flatten()[places_P + 1]
    chunk = rows_per_chunk(target.vocab_size)
    total = 0.0 * hidden_PD.float().sum()  # a graph even without any position
    for start in range(0, len(hidden_PD), chunk):
        args = (target, hidden_PD[start : start + chunk], wanted[start : start + chunk])
        if len(hidden_PD) > chunk and torch.is_grad_enabled():
            total = total + cast(Tensor, checkpoint(_chunk_loss, *args, use_reentrant=False))
        else:
            total = total + _chunk_loss(*args)
    return total, torch.full((), len(places_P), device=total.device)


def _chunk_loss(target: Target, hidden: Tensor, wanted: Tensor) -> Tensor:
    """The loss summed over some rows; `wanted` are reference states or token ids."""
    log_q = target.compute_logits(hidden).float().log_softmax(-1)
    if not wanted.is_floating_point():
        return F.nll_loss(log_q, wanted, reduction="sum")
    with torch.no_grad():
        log_p = target.compute_logits(wanted).float().log_softmax(-1)
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)


def add_adapter(model: nn.Module, args: JointArguments) -> nn.Module:
    """Wraps a frozen `model` in PEFT. Only its LoRA adapters train; they are float32 and change no output yet.

    Raises:
        ValueError: no layer has such a name, the LM head or the embeddings are among them, or peft is missing.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("lora_r needs peft: pip install 'draftsmith[peft]'") from error
    assert args.lora_r is not None
    names = args.lora_target_modules
    config = LoraConfig(
        r=args.lora_r,
        lora_alpha=cast(int, args.lora_alpha),
        lora_dropout=args.lora_dropout,
        target_modules=names[0] if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
    )
    adapted: Any = get_peft_model(cast(Any, model), config)
    borrowed = (adapted.get_input_embeddings(), adapted.get_base_model().get_output_embeddings())
    if any(hasattr(module, "lora_A") for module in borrowed):
        raise ValueError(
            f"got lora_target_modules {names}, which name the LM head or the token embeddings: heads borrow both "
            "without adapters; leave them out"
        )
    adapted.eval()
    return cast(nn.Module, adapted)


def load_adapter_weights(model: Any, folder: Path) -> None:
    """Loads stored weights into the adapters of `model`, a PEFT model.

    Raises:
        ValueError: the stored adapter has another rank, scale or set of layers.
    """
    from peft import PeftConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    stored, own = PeftConfig.from_pretrained(str(folder)), model.peft_config["default"]
    for name in ("r", "lora_alpha", "target_modules"):
        one, other = getattr(stored, name), getattr(own, name)
        if one != other:
            raise ValueError(
                f"{folder} has an adapter with {name} {one} (now {other}): give the options it was trained with, or "
                "train in another output_dir"
            )
    set_peft_model_state_dict(model, load_file(folder / WEIGHTS_FILE))


def adapt_target(model: nn.Module, heads: DraftHeads | None, args: JointArguments) -> nn.Module:
    """Returns `model` with the adapters of this run.

    Joint training: trainable adapters, which start from those stored with `heads`, if any. Otherwise: the adapters
    stored with `heads`, frozen, or the model itself.
    """
    stored = heads.find_adapter() if heads is not None and heads.config.target_adapter else None
    if args.is_on:
        model = add_adapter(model, args)
        if stored is not None:
            load_adapter_weights(model, stored)
    elif stored is not None:
        model = load_adapter(model, stored, merge=False)
    return model
