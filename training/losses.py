"""The draft losses: every step of an unroll against the target's distribution or the data's tokens.

Legend: B batch, T sequence length, M rows with a loss, C draft vocabulary, D hidden size.

A step of shift s predicts, at slot t, the token x_{t+s}. Its label is x_{t+s}; its teacher is the target's distribution
at position t + s - 1 (the one x_{t+s} was drawn from).

Worked example: the loss mask is [0, 0, 1, 1, 1] (tokens 2 to 4 are the assistant's). A step of shift 2 has a loss at
slots 0, 1, 2 with teachers at positions 1, 2, 3; a step of shift 3 at slots 0, 1 with teachers at 2, 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from heads import DraftStep
from inference.target import Target

LOSS_TYPES = ("cross_entropy", "distillation")
CHUNK_ELEMENTS = 2**25  # largest float32 logits tensor kept alive: 128 MiB


@dataclass(frozen=True)
class Teacher:
    """The target's view of a batch.

    Attributes:
        logits: [B, T, C] over the draft vocabulary, in the target's dtype.
        argmax: [B, T] int64, draft index of the target's most likely token over its WHOLE vocabulary; -1 when that
            token is outside the draft vocabulary.
        labels: [B, T] int64, draft index of x_t; -1 when outside.
    """

    logits: Tensor
    argmax: Tensor
    labels: Tensor


@torch.no_grad()
def compute_teacher(target: Target, last_hidden: Tensor, input_ids: Tensor, draft_token_ids: Tensor | None) -> Teacher:
    """Runs the target's LM head in chunks, so that no [B, T, V] float32 tensor is ever alive.

    Args:
        last_hidden: [B, T, D] the target's post-norm states.
        draft_token_ids: [C] target ids of the draft vocabulary; None = all.
    """
    batch, length, _ = last_hidden.shape
    rows = last_hidden.flatten(0, 1)
    columns = target.vocab_size if draft_token_ids is None else draft_token_ids.numel()
    logits = torch.empty(rows.shape[0], columns, dtype=rows.dtype, device=rows.device)
    argmax = torch.empty(rows.shape[0], dtype=torch.long, device=rows.device)
    chunk = max(1, CHUNK_ELEMENTS // target.vocab_size)
    for start in range(0, rows.shape[0], chunk):
        full = target.compute_logits(rows[start : start + chunk])
        argmax[start : start + chunk] = full.argmax(-1)
        logits[start : start + chunk] = full if draft_token_ids is None else full[:, draft_token_ids]
    labels = input_ids
    if draft_token_ids is not None:
        index = torch.full((target.vocab_size,), -1, dtype=torch.long, device=rows.device)
        index[draft_token_ids] = torch.arange(columns, device=rows.device)
        argmax, labels = index[argmax], index[input_ids]
    return Teacher(logits.view(batch, length, -1), argmax.view(batch, length), labels)


@dataclass
class LossOutput:
    """loss: scalar. Per step, detached sums: step_losses, top1 and top5 hits of the target's argmax, and the number of
    positions (those outside the draft vocabulary count as misses)."""

    loss: Tensor
    step_losses: list[Tensor] = field(default_factory=list)
    top1: list[Tensor] = field(default_factory=list)
    top5: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)


def draft_loss(
    steps: Sequence[DraftStep],
    teacher: Teacher,
    loss_mask: Tensor,
    *,
    loss_type: str,
    step_decay: float,
) -> LossOutput:
    """sum over steps of step_decay^k x mean loss of step k (Medusa, section 2.2.1: lambda 0.8; EAGLE-3: 0.8^k).

    Args:
        loss_mask: [B, T], 1 where x_t is to be predicted.
        loss_type: `cross_entropy` to the data's tokens or `distillation`: soft cross-entropy to the teacher's softmax
            over the draft vocabulary. Positions whose label (or teacher's argmax) is outside the draft vocabulary get
            no loss; the mean runs over the positions that have one.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type is {loss_type!r}; allowed are {', '.join(LOSS_TYPES)}")
    output = LossOutput(loss=steps[0].hidden.new_zeros((), dtype=torch.float32))
    for k, step in enumerate(steps):
        shift = step.shift
        predicted_BT = loss_mask[:, shift:].bool()
        argmax_BT = teacher.argmax[:, shift - 1 : -1]
        label_BT = teacher.labels[:, shift:]
        has_loss_BT = predicted_BT & ((label_BT if loss_type == "cross_entropy" else argmax_BT) >= 0)
        hidden_MD = step.hidden[:, : predicted_BT.shape[1]][has_loss_BT]
        teacher_MC = teacher.logits[:, shift - 1 : -1][has_loss_BT]
        wanted_M, label_M = argmax_BT[has_loss_BT], label_BT[has_loss_BT]
        total, top1, top5 = hidden_MD.new_zeros((), dtype=torch.float32), 0, 0
        chunk = max(1, CHUNK_ELEMENTS // teacher.logits.shape[-1])
        for start in range(0, hidden_MD.shape[0], chunk):
            part = slice(start, start + chunk)
            args = (step, hidden_MD[part], teacher_MC[part], label_M[part], wanted_M[part], loss_type)
            if hidden_MD.shape[0] > chunk and torch.is_grad_enabled():
                loss, hits1, hits5 = checkpoint(_chunk_loss, *args, use_reentrant=False)
            else:
                loss, hits1, hits5 = _chunk_loss(*args)
            total, top1, top5 = total + loss, top1 + hits1, top5 + hits5
        # Every parameter stays in the graph when no position has a loss (DDP waits for each gradient).
        mean = total / max(hidden_MD.shape[0], 1) + 0.0 * step.hidden.sum()
        output.loss = output.loss + step_decay**k * mean
        count = predicted_BT.sum()
        output.step_losses.append(mean.detach() * count)
        output.top1.append(torch.as_tensor(top1, device=count.device))
        output.top5.append(torch.as_tensor(top5, device=count.device))
        output.positions.append(count)
    return output


def _chunk_loss(
    step: DraftStep, hidden: Tensor, teacher: Tensor, labels: Tensor, wanted: Tensor, loss_type: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss of some rows and the hits of the target's argmax among the best 1 and 5 draft tokens."""
    logits = step.head(hidden).float()
    if loss_type == "cross_entropy":
        loss = F.cross_entropy(logits, labels, reduction="sum")
    else:
        loss = F.cross_entropy(logits, teacher.float().softmax(-1), reduction="sum")
    with torch.no_grad():
        # A hit among the best k: fewer than k columns score above the wanted one.
        score = logits.gather(1, wanted.clamp(min=0)[:, None])
        better = (logits > score).sum(-1)
        is_known = wanted >= 0
        return loss, ((better < 1) & is_known).sum(), ((better < 5) & is_known).sum()
