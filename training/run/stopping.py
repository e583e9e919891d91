"""A run that cannot continue stops at once, with place, reason and cure.

Legend: B batch, T sequence length, K depths.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads.modules.host_tensors import send
from draftsmith.training.features.encoding import TargetStates
from draftsmith.training.losses.draft_loss import LossOutput
from draftsmith.training.run.resume import find_newest

_CURE = "a lower learning_rate, more warmup_steps, a smaller max_grad_norm, or bf16 false"


class TrainingStoppedError(RuntimeError):
    """A run cannot continue. The message is for users, without a traceback: the step, the reason with its cure, and the
    last complete checkpoint."""

    def __init__(self, trainer: Any, reason: str) -> None:
        newest = find_newest(Path(trainer.args.output_dir))
        kept = "There is no complete checkpoint."
        if newest is not None:
            kept = (
                f"The last complete checkpoint is {newest}; --resume_from_checkpoint true continues from it (with "
                "other options: --resume_with_changes true)."
            )
        super().__init__(f"stopped at step {trainer.state.global_step + 1}: {reason}. {kept}")


@dataclass
class FiniteWatch:
    """Checks that losses and gradients are finite, before the optimizer changes the heads with them.

    Each process checks its own losses and the gradients' norm, which all processes share, so all of them stop. The host
    waits for the device once per optimizer step.
    """

    _states_are_finite: list[Tensor] = field(default_factory=list)  # one bool [] for each batch of the step
    _losses: list[Tensor] = field(default_factory=list)  # [K] sums by depth

    def see(self, states: TargetStates, attention_mask: Tensor, output: LossOutput) -> None:
        """Notes a training batch; attention_mask: [B, T] on the host."""
        is_finite_BT = states.features.isfinite().all(-1) & states.last_hidden.isfinite().all(-1)
        self._states_are_finite.append((is_finite_BT | send(attention_mask == 0, is_finite_BT.device)).all())
        self._losses.append(torch.stack(output.loss_sums).detach())

    def check(self, grad_norm: Any, trainer: Any) -> None:
        """Checks everything noted since the last optimizer step.

        Args:
            grad_norm: of all processes together; None where it is unknown, or where a scaler of float16 gradients
                skips steps that overflow.

        Raises:
            TrainingStoppedError: naming the step, what is not finite, and a cure.
        """
        losses = torch.stack(self._losses).isfinite()
        are_states_finite = bool(torch.stack(self._states_are_finite).all())
        self._losses, self._states_are_finite = [], []
        norm = 0.0 if grad_norm is None else float(grad_norm)
        if bool(losses.all()) and are_states_finite and math.isfinite(norm):
            return
        depths = [str(k + 1) for k, is_finite in enumerate(losses.all(0).tolist()) if not is_finite]
        if not are_states_finite:
            where, cure = "the target's states are", "target_dtype bfloat16 or float32"
        elif depths:
            where, cure = f"the loss at depth {', '.join(depths)} is", _CURE
        else:
            where, cure = f"the gradient (its norm is {norm}) is", _CURE
        raise TrainingStoppedError(trainer, f"{where} NaN or infinite ({trainer.loss_type}). Try {cure}")
