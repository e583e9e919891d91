"""A run that cannot continue stops at once, with place, reason and cure: losses that are not finite, full disks.

Legend: B batch, T sequence length, K depths.
"""

from __future__ import annotations

import errno
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from training.features.sources import TargetStates
from training.losses.draft_loss import LossOutput
from training.run.resume import find_newest

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Torch's and safetensors' writers keep no error number.
_FULL_TEXT = re.compile(
    r"No space left|File too large|quota exceeded|PytorchStreamWriter|unexpected pos|iostream error", re.IGNORECASE
)


class TrainingStoppedError(RuntimeError):
    """A run cannot continue. The message names the cure and is for users, without a traceback."""


@dataclass
class FiniteWatch:
    """Checks that losses and gradients are finite, before the optimizer changes the heads with them.

    Each process checks its own losses and the gradients' norm, which all processes share, so all of them stop. The host
    waits for the device once per optimizer step.
    """

    _states_are_finite: list[Tensor] = field(default_factory=list)  # one bool [] for each batch of the step
    _losses: list[Tensor] = field(default_factory=list)  # [K] sums by depth

    def see(self, states: TargetStates, attention_mask: Tensor, output: LossOutput) -> None:
        """Notes a training batch; attention_mask: [B, T]."""
        is_finite_BT = states.features.isfinite().all(-1) & states.last_hidden.isfinite().all(-1)
        self._states_are_finite.append((is_finite_BT | (attention_mask == 0)).all())
        self._losses.append(torch.stack(output.loss_sums).detach())

    def check(self, grad_norm: Any, trainer: Any) -> None:
        """Checks everything noted since the last optimizer step.

        Args:
            grad_norm: of all processes together; None where it is unknown, or where a scaler of float16 gradients
                skips steps that overflow.

        Raises:
            TrainingStoppedError: naming the step, the depths, the learning rate, and the parts that are finite.
        """
        losses = torch.stack(self._losses).isfinite()
        are_states_finite = bool(torch.stack(self._states_are_finite).all())
        self._losses, self._states_are_finite = [], []
        norm = 0.0 if grad_norm is None else float(grad_norm)
        if bool(losses.all()) and are_states_finite and math.isfinite(norm):
            return
        depths = [str(k + 1) for k, is_finite in enumerate(losses.all(0).tolist()) if not is_finite]
        if depths:
            where = f"the loss at depth {', '.join(depths)} is"
        else:
            where = "the target's states are" if math.isfinite(norm) else f"the gradient (its norm is {norm}) is"
        named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        weights = [name for name, weight in named if not bool(weight.isfinite().all())]
        rates = dict.fromkeys(group["lr"] for group in trainer.optimizer.param_groups)
        raise TrainingStoppedError(
            f"stopped at step {trainer.state.global_step + 1}: {where} NaN or infinite ({trainer.loss_type}). "
            f"Learning rate {', '.join(f'{rate:.3g}' for rate in rates)}; the target's states of the batch are "
            f"{'finite' if are_states_finite else 'NaN or infinite'}; the heads' weights before this step are "
            f"{'finite' if not weights else 'NaN or infinite in ' + ', '.join(weights[:5])}. "
            f"Try {_advice(trainer, are_states_finite, weights)}. {_last_checkpoint(trainer)}"
        )


def _advice(trainer: Any, are_states_finite: bool, weights: list[str]) -> str:
    if not are_states_finite:
        return (
            f"another target_dtype (it computes in {str(trainer.target.dtype).removeprefix('torch.')}; bfloat16 and "
            "float32 have a larger range than float16), or look for damaged weights in the target"
        )
    if weights and trainer.state.global_step == 0:
        return "other --init_heads: these are damaged"
    low_precision = ", bf16 false" if trainer.args.bf16 else ", bf16 instead of fp16" if trainer.args.fp16 else ""
    return f"a lower learning_rate, more warmup_steps, a smaller max_grad_norm{low_precision}"


def _last_checkpoint(trainer: Any) -> str:
    newest = find_newest(Path(trainer.args.output_dir))
    if newest is None:
        return "There is no complete checkpoint."
    return (
        f"The last complete checkpoint is {newest}; --resume_from_checkpoint true continues from it (with other "
        "options: --resume_with_changes true)."
    )


@contextmanager
def explain_full_disk(trainer: Any, name: str, size: int | None = None) -> Iterator[None]:
    """Turns the errors of a full disk, a quota or a limit on file sizes, while `name` is written, into a clear one.

    Args:
        size: bytes of the file; None = bytes of a checkpoint.

    Raises:
        TrainingStoppedError: with the free and the needed space, and the last complete checkpoint.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if getattr(error, "errno", None) not in _FULL and not _FULL_TEXT.search(str(error)):
            raise
        folder = Path(trainer.args.output_dir)
        free = shutil.disk_usage(folder).free / 2**20
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        needed = _checkpoint_size(trainer.model) if size is None else size
        raise TrainingStoppedError(
            f"{name} could not be written into {folder}: {reason}. {free:,.0f} MiB are free, and it needs about "
            f"{math.ceil(needed / 2**20):,} MiB. {_last_checkpoint(trainer)} Make room first (save_total_limit is the "
            "number of checkpoints that stay)."
        ) from error


def _checkpoint_size(heads: nn.Module) -> int:
    """Bytes of a checkpoint, about: the heads, and two float32 moments of each trained weight."""
    weights = sum(int(tensor.nbytes) for tensor in heads.state_dict().values())
    trained = sum(weight.numel() for weight in heads.parameters() if weight.requires_grad)
    return weights + 2 * 4 * trained
