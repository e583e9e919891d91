"""The draft losses: every step of an unroll against the target's distribution or the data's tokens.

Legend: B batch, T sequence length, P positions whose next token is predicted, S slots that a step drafts from (T, or
those drawn), M of them that it scores, C draft vocabulary, V target vocabulary, D hidden size.

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

LOSS_TYPES = ("cross_entropy", "distillation", "topk_distillation", "total_variation")
# HASS (arXiv 2408.15766, section 3.1): how many of the teacher's best tokens count twice, and how much.
TOP_K, TOP_K_WEIGHT = 10, 1.0
# DSpark (arXiv 2607.05147, eq. 10): the L1 distance is the sum of |p - q|, twice the total variation.
CROSS_ENTROPY_WEIGHT, L1_WEIGHT = 0.1, 0.9
CHUNK_ELEMENTS = 2**25  # largest float32 logits tensor kept alive: 128 MiB


@dataclass(frozen=True)
class Teacher:
    """The target's view of a batch, at the P positions whose next token is predicted.

    Attributes:
        logits: [P, C] over the draft vocabulary, in the target's dtype; None when nothing is distilled.
        hidden: [P, D] the states that the target's LM head reads, in the target's dtype.
        rows: [B, T] int64, a position's row of `logits` and `hidden`; meaningless where no next token is predicted.
        argmax: [B, T] int64, draft index of the target's most likely token over its WHOLE vocabulary; -1 when that
            token is outside the draft vocabulary, or no next token is predicted.
        labels: [B, T] int64, draft index of x_t; -1 when outside.
        num_columns: C.
    """

    logits: Tensor | None
    hidden: Tensor
    rows: Tensor
    argmax: Tensor
    labels: Tensor
    num_columns: int


@torch.no_grad()
def compute_teacher(
    target: Target,
    last_hidden: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    draft_token_ids: Tensor | None,
    *,
    loss_type: str,
) -> Teacher:
    """Runs the target's LM head where it is needed and in chunks, so that no [B, T, V] float32 tensor is ever alive.

    Args:
        last_hidden: [B, T, D] the target's post-norm states.
        loss_mask: [B, T], 1 where x_t is to be predicted.
        draft_token_ids: [C] target ids of the draft vocabulary; None = all.
        loss_type: as in `draft_loss`; cross-entropy to the data's tokens needs no logits.
    """
    num_columns = target.vocab_size if draft_token_ids is None else draft_token_ids.numel()
    is_used_BT = F.pad(loss_mask[:, 1:], (0, 1)).bool()
    hidden_PD = last_hidden[is_used_BT]
    argmax_P = torch.empty(hidden_PD.shape[0], dtype=torch.long, device=hidden_PD.device)
    logits_PC = hidden_PD.new_empty(hidden_PD.shape[0], num_columns) if loss_type != "cross_entropy" else None
    chunk = max(1, CHUNK_ELEMENTS // target.vocab_size)
    for start in range(0, hidden_PD.shape[0], chunk):
        part = slice(start, start + chunk)
        full = target.compute_logits(hidden_PD[part])
        argmax_P[part] = full.argmax(-1)
        if logits_PC is not None:
            logits_PC[part] = full if draft_token_ids is None else full[:, draft_token_ids]
    labels = input_ids
    if draft_token_ids is not None:
        index = torch.full((target.vocab_size,), -1, dtype=torch.long, device=hidden_PD.device)
        index[draft_token_ids] = torch.arange(num_columns, device=hidden_PD.device)
        argmax_P, labels = index[argmax_P], index[input_ids]
    argmax_BT = torch.full_like(input_ids, -1).masked_scatter(is_used_BT, argmax_P)
    rows_BT = is_used_BT.flatten().cumsum(0).view_as(input_ids) - 1
    return Teacher(logits_PC, hidden_PD, rows_BT, argmax_BT, labels, num_columns)


@dataclass
class LossOutput:
    """loss: scalar with gradients. The lists hold one detached scalar per step:

    loss_sums, loss_counts: the loss summed over the positions that have one, and their number.
    top1, top5, positions: hits of the target's argmax among the best 1 and 5 draft tokens, and the number of positions
        that are predicted at all (an argmax outside the draft vocabulary is a miss).
    """

    loss: Tensor
    loss_sums: list[Tensor] = field(default_factory=list)
    loss_counts: list[Tensor] = field(default_factory=list)
    top1: list[Tensor] = field(default_factory=list)
    top5: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)


def draft_loss(
    steps: Sequence[DraftStep], teacher: Teacher, loss_mask: Tensor, *, loss_type: str, step_decay: float
) -> LossOutput:
    """sum over steps of step_decay^k x mean loss of step k (Medusa, section 2.2.1: lambda 0.8; EAGLE-3: 0.8^k).

    The loss of a step is token_weight x the loss over its tokens, plus feature_weight x SmoothL1 between its states and
    the target's (EAGLE, arXiv 2401.15077, section 3.2; the mean over D).

    Args:
        teacher: of the same batch, loss mask and loss type.
        loss_mask: [B, T], 1 where x_t is to be predicted.
        loss_type: `cross_entropy` to the data's tokens; `distillation`: soft cross-entropy to the teacher's softmax p
            over the draft vocabulary; `topk_distillation`: that, plus `TOP_K_WEIGHT` x the sum of -p log q over the
            teacher's best `TOP_K` tokens (HASS, arXiv 2408.15766, section 3.1), whatever the token_weight;
            `total_variation`: 0.9 times the L1 distance to p, which is what is rejected, and 0.1 times the
            cross-entropy to the data's tokens (DSpark, arXiv 2607.05147, eq. 10). Positions whose label (with a
            teacher: the teacher's argmax) is outside the draft vocabulary get no loss; the mean runs over the positions
            that have one.

    A step's `confidence` adds its binary cross-entropy to the chance 1 - TV(p, q) that the drafted token is accepted
    (DSpark, eq. 8); without a teacher, to whether the best drafted token is the target's own.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type is {loss_type!r}; allowed are {', '.join(LOSS_TYPES)}")
    output = LossOutput(loss=steps[0].hidden.new_zeros((), dtype=torch.float32))
    chunk = max(1, CHUNK_ELEMENTS // teacher.num_columns)
    for k, step in enumerate(steps):
        is_predicted_BS = step.read_ahead(loss_mask, step.shift).bool()
        argmax_BS = step.read_ahead(teacher.argmax, step.shift - 1, fill=-1)
        label_BS = step.read_ahead(teacher.labels, step.shift, fill=-1)
        has_loss_BS = (label_BS if teacher.logits is None else argmax_BS) >= 0
        is_scored_BS = is_predicted_BS & (has_loss_BS | (argmax_BS >= 0))
        rows = _ScoredRows(
            hidden=step.hidden[is_scored_BS],
            teacher=step.read_ahead(teacher.rows, step.shift - 1)[is_scored_BS],
            label=label_BS[is_scored_BS],
            argmax=argmax_BS[is_scored_BS],
            confidence=None if step.confidence is None else step.confidence[is_scored_BS],
        )
        # No position at all: the graph still runs through the head, because DDP waits for every parameter's gradient.
        total = torch.zeros_like(output.loss) if len(rows) else _touch(step)
        top1 = top5 = torch.zeros_like(rows.label[:0].sum())
        for start in range(0, len(rows), chunk):
            args = (step, rows.part(start, start + chunk), teacher, loss_type)
            if len(rows) > chunk and torch.is_grad_enabled():
                loss, hits1, hits5 = checkpoint(_chunk_loss, *args, use_reentrant=False)
            else:
                loss, hits1, hits5 = _chunk_loss(*args)
            total, top1, top5 = total + loss, top1 + hits1, top5 + hits5
        count = (is_predicted_BS & has_loss_BS).sum()
        output.loss = output.loss + step_decay**k * total / count.clamp(min=1)
        output.loss_sums.append(total.detach())
        output.loss_counts.append(count)
        output.top1.append(top1)
        output.top5.append(top5)
        output.positions.append(is_predicted_BS.sum())
    return output


@dataclass(frozen=True)
class _ScoredRows:
    """The M columns of a step that are scored: hidden [M, D]; teacher [M], rows of its logits; label and argmax [M],
    draft indices or -1; confidence [M], or None."""

    hidden: Tensor
    teacher: Tensor
    label: Tensor
    argmax: Tensor
    confidence: Tensor | None

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def part(self, start: int, end: int) -> _ScoredRows:
        confidence = None if self.confidence is None else self.confidence[start:end]
        hidden, teacher, label, argmax = (x[start:end] for x in (self.hidden, self.teacher, self.label, self.argmax))
        return _ScoredRows(hidden, teacher, label, argmax, confidence)


def _touch(step: DraftStep) -> Tensor:
    """Zero, through everything that a loss of the step would go through."""
    zero = 0.0 * step.head(step.hidden[:1, :1]).float().sum()
    return zero if step.confidence is None else zero + 0.0 * step.confidence[:1, :1].float().sum()


def _chunk_loss(step: DraftStep, rows: _ScoredRows, teacher: Teacher, loss_type: str) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss of some rows, and hits of the target's argmax among the best 1 and 5. A label of -1 has no
    cross-entropy; with a teacher, an argmax of -1 has no loss at all."""
    logits = step.head(rows.hidden).float()
    label_loss = F.cross_entropy(logits, rows.label, ignore_index=-1, reduction="none")  # [M]
    if teacher.logits is None:
        has_loss = rows.label >= 0
        loss = step.token_weight * label_loss
        accepted = (logits.detach().argmax(-1) == rows.argmax).float()
    else:
        has_loss = rows.argmax >= 0
        p = teacher.logits[rows.teacher].float().softmax(-1)
        if loss_type == "total_variation":
            distance = (logits.softmax(-1) - p).abs().sum(-1)
            loss = step.token_weight * (L1_WEIGHT * distance + CROSS_ENTROPY_WEIGHT * label_loss)
        else:
            loss = step.token_weight * F.cross_entropy(logits, p, reduction="none")
        if loss_type == "topk_distillation":
            best = p.topk(min(TOP_K, teacher.num_columns), dim=-1)
            loss = loss - TOP_K_WEIGHT * (best.values * logits.log_softmax(-1).gather(-1, best.indices)).sum(-1)
        if rows.confidence is not None:
            accepted = 1 - 0.5 * (logits.detach().softmax(-1) - p).abs().sum(-1)
    if step.feature_weight:
        hidden, wanted = rows.hidden.float(), teacher.hidden[rows.teacher].float()
        loss = loss + step.feature_weight * F.smooth_l1_loss(hidden, wanted, reduction="none").mean(-1)
    if rows.confidence is not None:
        chance = accepted.clamp(0, 1)
        loss = loss + F.binary_cross_entropy_with_logits(rows.confidence.float(), chance, reduction="none")
    loss = (loss * has_loss).sum()
    with torch.no_grad():
        # Among the best 5: fewer than 5 columns score above it.
        better = (logits > logits.gather(1, rows.argmax.clamp(min=0)[:, None])).sum(-1)
        return loss, (logits.argmax(-1) == rows.argmax).sum(), ((better < 5) & (rows.argmax >= 0)).sum()
