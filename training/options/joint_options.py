"""The options of joint training: LoRA adapters of the target, trained with the heads (Medusa-2, arXiv 2401.10774)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftsmith.training.data.options import option, refuse_without

# Weight of the heads' loss beside each target loss: section 2.2.2 of the paper, and its appendix.
_HEADS_LOSS_WEIGHTS = {"lm": 0.2, "self_distillation": 0.01}


@dataclass
class JointArguments:
    """Joint training of heads and target (on with --lora_r)."""

    lora_r: int | None = option(
        default=None, help="Rank of the target's LoRA adapters (Medusa-2 uses 32); none = frozen target."
    )
    lora_alpha: float = option(default=16, help="The adapters are scaled by lora_alpha / lora_r.")
    lora_dropout: float = option(default=0.0, help="Dropout on the adapters' inputs: a share below 1.")
    lora_target_modules: list[str] = option(
        default_factory=lambda: ["all-linear"],
        help="Ends of the names of adapted layers; all-linear = every linear layer but the LM head.",
    )
    target_loss: Literal["self_distillation", "lm"] = option(
        default="self_distillation",
        help="Loss that keeps the target as it is: KL to itself without adapters, or lm = next token.",
    )
    heads_loss_weight: float | None = option(
        default=None, help="Weight of the heads' loss; none = the paper's, 0.01, or 0.2 with lm."
    )
    heads_lr_multiplier: float = option(
        default=4.0, help="The heads' multiple of --learning_rate, which is the adapters' rate (paper: 4)."
    )

    def __post_init__(self) -> None:
        if self.lora_r is None:
            refuse_without(self, "lora_r", self.__dataclass_fields__.keys())
        if self.lora_r is not None and self.lora_r < 1:
            raise ValueError(f"got lora_r {self.lora_r}: it must be at least 1; leave it out to train only the heads")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"got lora_dropout {self.lora_dropout}: it is a share, from 0 to below 1")
        for name in ("lora_alpha", "heads_loss_weight", "heads_lr_multiplier"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"got {name} {value}: it must be above 0")

    @property
    def is_on(self) -> bool:
        return self.lora_r is not None

    @property
    def loss_weight(self) -> float:
        """Weight of the heads' loss."""
        return _HEADS_LOSS_WEIGHTS[self.target_loss] if self.heads_loss_weight is None else self.heads_loss_weight
