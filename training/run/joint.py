"""Joint training of heads and target, for any kind of heads; with Medusa heads it is Medusa-2 (arXiv 2401.10774).

The target gets LoRA adapters and two losses: its own, which keeps it the model it is (section 2.3.2: the KL divergence
to itself without adapters; or the language modelling loss on the data, section 2.2.2), and the heads' loss, whose
gradient flows through the states that the heads read.

Legend: B batch, T sequence length, P positions whose next token is predicted, D hidden size, V target vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from heads import DraftHeads
from heads.adapter import WEIGHTS_FILE, load_adapter
from inference.targets.encoding import recomputing_layers
from inference.targets.target import Target
from training.data.collation import find_documents
from training.features.sources import OnlineFeatures, TargetStates
from training.losses.draft_loss import LossOutput
from training.losses.teacher import rows_per_chunk

_INSTALL_HINT = "lora_r trains adapters of the target, which needs peft: pip install 'draftsmith[peft]'"
# Section 2.2.2 and its appendix: of the heads' loss beside the language modelling loss, and beside self-distillation.
_HEADS_LOSS_WEIGHTS = {"lm": 0.2, "self_distillation": 0.01}


@dataclass
class JointArguments:
    """Training the target along with its heads, through LoRA adapters; off unless `lora_r` is given."""

    lora_r: int | None = field(
        default=None,
        metadata={
            "help": "Rank of LoRA adapters of the target that are trained along with the heads (Medusa-2; the paper: "
            "32); none = the target stays as it is."
        },
    )
    lora_alpha: float = field(default=16, metadata={"help": "The adapters are scaled by lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout of what the adapters read: a share below 1."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={
            "help": "Layers that get an adapter, by the ends of their names; all-linear = every linear layer but the "
            "LM head, which is refused here, as the token embeddings are."
        },
    )
    target_loss: Literal["self_distillation", "lm"] = field(
        default="self_distillation",
        metadata={
            "help": "What keeps the target the model it is: self_distillation = the KL divergence to itself without "
            "adapters (for any data), lm = the language modelling loss on the assistant's tokens (data that it was "
            "trained on)."
        },
    )
    heads_loss_weight: float | None = field(
        default=None,
        metadata={"help": "Of the heads' loss beside the target's; none = the paper's, 0.01, or 0.2 with lm."},
    )
    heads_lr_multiplier: float = field(
        default=4.0,
        metadata={"help": "Heads learn at this multiple of --learning_rate, which is then the adapters' (paper: 4)."},
    )
    heads_warmup_steps: float = field(
        default=0.1,
        metadata={
            "help": "The heads are trained alone first: a share of all steps below 1, a number of steps from 1 on. "
            "Then the adapters' learning rate rises during --warmup_steps."
        },
    )

    def __post_init__(self) -> None:
        changed = [key.name for key in dataclasses.fields(self) if getattr(self, key.name) != _default(key)]
        if self.lora_r is None and changed:
            raise ValueError(f"got {', '.join(changed)} without lora_r: give lora_r (the paper: 32), or leave them out")
        if self.lora_r is not None and self.lora_r < 1:
            raise ValueError(f"got lora_r {self.lora_r}: it must be at least 1; leave it out to train heads alone")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"got lora_dropout {self.lora_dropout}: it is a share, from 0 to below 1")
        if self.heads_warmup_steps < 0 or (self.heads_warmup_steps > 1 and self.heads_warmup_steps % 1):
            raise ValueError(f"got heads_warmup_steps {self.heads_warmup_steps}: give a share below 1, or whole steps")
        for name in ("lora_alpha", "heads_loss_weight", "heads_lr_multiplier"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"got {name} {value}: it must be above 0")

    @property
    def is_on(self) -> bool:
        return self.lora_r is not None

    @property
    def loss_weight(self) -> float:
        """Of the heads' loss."""
        return _HEADS_LOSS_WEIGHTS[self.target_loss] if self.heads_loss_weight is None else self.heads_loss_weight

    def num_warmup_steps(self, num_steps: int) -> int:
        """Optimizer steps, of `num_steps`, in which the heads are trained alone."""
        share = self.heads_warmup_steps
        return round(share * num_steps) if share < 1 else int(share)


def _default(key: dataclasses.Field[Any]) -> Any:
    return key.default if key.default is not dataclasses.MISSING else cast(Any, key.default_factory)()


def add_adapter(model: nn.Module, args: JointArguments) -> nn.Module:
    """A PEFT model around a frozen `model`: LoRA adapters that change nothing yet, in float32, alone are trained.

    Raises:
        ValueError: no such layers, the LM head or the embeddings among them, or peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(_INSTALL_HINT) from error
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
            f"got lora_target_modules {names}, which name the LM head or the token embeddings: heads borrow those as "
            "they are; leave them out"
        )
    adapted.eval()
    return cast(nn.Module, adapted)


def load_adapter_weights(model: Any, folder: Path) -> None:
    """Puts stored weights into the adapters of `model`, a PEFT model.

    Raises:
        ValueError: the stored adapter is of another rank, scale, or for other layers.
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
    """`model`, or a PEFT model around it: with the adapters that are to be trained, which start from those that `heads`
    were trained with, if any; or, when heads alone are trained, with the latter as they are."""
    stored = heads.find_adapter() if heads is not None and heads.config.target_adapter else None
    if args.is_on:
        model = add_adapter(model, args)
        if stored is not None:
            load_adapter_weights(model, stored)
    elif stored is not None:
        model = load_adapter(model, stored, merge=False)
    return model


@dataclass
class JointOutput:
    """loss: what is minimised. heads: what the heads' loss is made of. target_sum, target_count: the target's loss
    summed over the positions that are predicted, detached, and their number; None while the heads are trained alone."""

    loss: Tensor
    heads: LossOutput
    target_sum: Tensor | None = None
    target_count: Tensor | None = None


class JointModel(nn.Module):
    """Heads and the adapters of their target as one module, whose `forward` is the whole training step: hooks of DDP
    and ZeRO see every parameter that is trained, and the frozen ones are none of its parameters.

    Args:
        heads: bound to `target`.
        target: a PEFT model with the adapter "default".
    """

    def __init__(self, heads: DraftHeads, target: Target, args: JointArguments) -> None:
        super().__init__()
        self.heads = heads
        self.adapters = nn.ParameterList(
            parameter for parameter in target.model.parameters() if parameter.requires_grad
        )
        self.args = args
        self._target = [target]  # hidden from nn.Module, which would save and move it
        self._features = OnlineFeatures(target, heads.feature_layers, with_autograd=True)
        self._is_checkpointing = False
        heads.belong_to_adapter(target.model)

    @property
    def target(self) -> Target:
        return self._target[0]

    @property
    def config(self) -> Any:
        """Whose name and sizes Trainer's integrations report."""
        return self.heads.config

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Keep only the inputs of the target's layers, and compute them again in the backward pass. Trainer calls it.

        Raises:
            ValueError: for settings of it; there are none here.
        """
        kwargs = activation_checkpointing_kwargs or {}
        if kwargs not in ({}, {"use_reentrant": False}) or every_n_layers != 1 or offload:
            settings = {**kwargs, "every_n_layers": every_n_layers, "offload": offload}
            raise ValueError(
                f"got activation_checkpointing_kwargs {settings}: with lora_r all layers of the target are run again, "
                "without reentrance; leave them out"
            )
        self._is_checkpointing = True

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """The same, as older releases of transformers call it."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs)

    def train(self, mode: bool = True) -> JointModel:
        """The target stays in evaluation mode, where its passes are those of decoding; its adapters' dropout goes
        along."""
        super().train(mode)
        for name, module in self.target.model.named_modules():
            if "lora_dropout" in name:
                module.training = mode
        return self

    def forward(
        self, batch: Mapping[str, Tensor], draft: Callable[[TargetStates], LossOutput], *, trains_target: bool
    ) -> JointOutput:
        """The losses of one batch.

        Args:
            draft: the heads' loss on the target's states; it runs `self.heads`.
            trains_target: False: the heads are trained alone.
        """
        if not trains_target:
            with torch.no_grad():
                states = self._features(batch)
            output = draft(states)
            # Zero, through the adapters, because DDP waits for every parameter's gradient.
            zero = torch.stack([0.0 * parameter.float().sum() for parameter in self.adapters]).sum()
            return JointOutput(self.args.loss_weight * output.loss + zero, output)
        reference = self._encode_without_adapters(batch) if self.args.target_loss == "self_distillation" else None
        with recomputing_layers(self.target) if self._is_checkpointing else nullcontext():
            states = self._features(batch)
        output = draft(states)
        total, count = target_loss(self.target, states.last_hidden, reference, batch)
        loss = total / count.clamp(min=1) + self.args.loss_weight * output.loss
        return JointOutput(loss, output, total.detach(), count)

    @torch.no_grad()
    def _encode_without_adapters(self, batch: Mapping[str, Tensor]) -> Tensor:
        with self.target.model.disable_adapter():
            return self._features(batch).last_hidden


def target_loss(
    target: Target, last_hidden: Tensor, reference: Tensor | None, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The target's own loss, summed over the P positions whose next token is predicted, and P.

    Args:
        last_hidden: [B, T, D] post-norm, with gradients.
        reference: [B, T, D] the same without adapters: the loss is KL(without adapters || with them); None = it is the
            cross-entropy to the data's next token.
    """
    is_predicted_BT = F.pad(batch["loss_mask"][:, 1:], (0, 1)).bool()
    if (documents_BT := find_documents(batch)) is not None:
        is_predicted_BT &= F.pad(documents_BT[:, 1:], (0, 1), value=-1) == documents_BT
    hidden_PD = last_hidden[is_predicted_BT]
    if reference is not None:
        wanted = reference[is_predicted_BT]
    else:
        wanted = F.pad(batch["input_ids"][:, 1:], (0, 1))[is_predicted_BT]
    chunk = rows_per_chunk(target.vocab_size)
    total = 0.0 * hidden_PD.float().sum()  # no position at all: the graph is there all the same
    for start in range(0, len(hidden_PD), chunk):
        args = (target, hidden_PD[start : start + chunk], wanted[start : start + chunk])
        if len(hidden_PD) > chunk and torch.is_grad_enabled():
            total = total + cast(Tensor, checkpoint(_chunk_loss, *args, use_reentrant=False))
        else:
            total = total + _chunk_loss(*args)
    return total, is_predicted_BT.sum()


def _chunk_loss(target: Target, hidden: Tensor, wanted: Tensor) -> Tensor:
    """Summed over some rows; `wanted`: the states to be kept to, or token ids."""
    log_q = target.compute_logits(hidden).float().log_softmax(-1)
    if not wanted.is_floating_point():
        return F.nll_loss(log_q, wanted, reduction="sum")
    with torch.no_grad():
        log_p = target.compute_logits(wanted).float().log_softmax(-1)
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)
