"""The draft loss: compares every step of an unroll with the target's distribution or the data's tokens.

Legend: B batch, T sequence length, P positions whose next token is predicted, S slots that a step drafts from (T, or
a drawn subset), M scored slots, K steps, C draft vocabulary, V target vocabulary, D hidden size.

A step of shift s predicts, at slot t, the token x_{t+s}. Its label is x_{t+s}; its teacher is the target's distribution
at position t + s - 1 (the one x_{t+s} was drawn from).

Worked example: the loss mask is [0, 0, 1, 1, 1] (tokens 2 to 4 are the assistant's). A step of shift 2 has a loss at
slots 0, 1, 2 with teachers at positions 1, 2, 3; a step of shift 3 at slots 0, 1 with teachers at 2, 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draftsmith.heads import DraftHeads, DraftStep
from draftsmith.heads.modules.host_tensors import OnHost, read_on_host, send
from draftsmith.inference.targets.model_config import find_compute_dtype
from draftsmith.training.losses.depth_weights import D_PACE, fixed_weights, weigh_by_d_pace
from draftsmith.training.losses.early_gradients import EarlyGradients, find_leaves
from draftsmith.training.losses.selection import Selection
from draftsmith.training.losses.teacher import Teacher, rows_per_chunk
from draftsmith.training.losses.terms import LossMixture, ScoredTokens, parse_loss

BLOCK_ELEMENTS = 2**20  # logits whose losses a CPU computes at a time: 4 MiB in float32


@dataclass
class LossOutput:
    """loss: scalar with gradients. The lists hold one detached scalar per step:

    loss_sums, positions: the sum of the losses, and the number of predicted positions.
    top1, top5: hits of the target's argmax among the best 1 and 5 draft tokens (an argmax outside the draft vocabulary
        is a miss).
    """

    loss: Tensor
    loss_sums: list[Tensor] = field(default_factory=list)
    top1: list[Tensor] = field(default_factory=list)
    top5: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)


def draft_loss(
    steps: Sequence[DraftStep],
    teacher: Teacher,
    loss_mask: Tensor | OnHost,
    *,
    loss_type: str,
    step_decay: float = 1.0,
    depth_weights: str | None = None,
    counts: Tensor | None = None,
    keeps_graph: bool = False,
) -> LossOutput:
    """Returns the sum over steps of the step's weight x the mean loss of the step.

    Args:
        teacher: of the same batch, loss mask and loss type.
        loss_mask: [B, T] on the host (which otherwise waits for the device), 1 where x_t is to be predicted.
        loss_type: a loss or a mixture (`draftsmith.training.losses.terms.parse_loss`). The mean is over the predicted
            positions, whose number is known before the target runs. A position whose argmax (for losses of only the
            data's tokens: whose label) is outside the draft vocabulary adds 0, as in EAGLE-3's code.
        step_decay: the weight of step k is step_decay^k, unless `depth_weights` is given.
        depth_weights: `d_pace` (`draftsmith.training.losses.depth_weights`), or None.
        counts: [K] on the device, the predicted positions of each step to take the mean over, where the batch is a part
            of a larger one: the losses of the parts then add up to its loss. None = those of the batch.
        keeps_graph: compute all gradients in the backward pass, which runs the LM head again where its logits do not
            fit: for heads whose parameters are whole only inside passes (FSDP, ZeRO-3). `d_pace` needs this too, and
            float16, whose gradients underflow before the loss is scaled.

    A step's `confidence` adds the binary cross-entropy with the chance 1 - TV(p, q) that the drafted token is accepted
    (DSpark, eq. 8); without a distribution, with whether the best drafted token is the target's own.
    A step with a selector adds `Selection.loss`. Then top1, top5 and `d_pace` are about the selector's drafts.
    """
    mixture = parse_loss(loss_type)
    is_d_pace = depth_weights == D_PACE
    weights = fixed_weights(len(steps), step_decay=step_decay, depth_weights=depth_weights)
    is_half = find_compute_dtype(steps[0].hidden.device, steps[0].hidden.dtype) == torch.float16
    early = EarlyGradients() if torch.is_grad_enabled() and not (keeps_graph or is_d_pace or is_half) else None
    mask = read_on_host(loss_mask)
    # All predicted positions, whose number the host knows; those with a loss are known on the device only.
    predicted = [step.find_predicted(mask) for step in steps]
    sizes = [max(len(columns), 1) for columns, _ in predicted] if counts is None else counts.clamp(min=1)
    scales = [weight / size for weight, size in zip(weights, sizes, strict=True)]
    scores = [
        _score(step, where, teacher, mixture, wants_chances=is_d_pace, scale=scale, early=early)
        for step, where, scale in zip(steps, predicted, scales, strict=True)
    ]
    own = _d_pace(scores, mask.shape) if is_d_pace else [None] * len(steps)
    output = LossOutput(loss=steps[0].hidden.new_zeros((), dtype=torch.float32))
    for step, score, scale, own_M in zip(steps, scores, scales, own, strict=True):
        # Without a position the graph still runs through the head: DDP waits for the gradient of every parameter.
        losses_M = score.losses if own_M is None else score.losses * own_M
        total = losses_M.sum() if len(losses_M) else _touch(step)
        if early is None or not len(losses_M):
            output.loss = output.loss + scale * total
        output.loss_sums.append(total.detach())
        output.top1.append(score.top1)
        output.top5.append(score.top5)
        output.positions.append(torch.full_like(score.top1, len(losses_M)))
    if early is not None and (loss := early.loss()) is not None:
        output.loss = output.loss + loss
    return output


def check_loss(loss_type: str, heads: DraftHeads) -> None:
    """Raises ValueError for a loss of states with heads whose steps do not estimate the target's states."""
    if "states" in parse_loss(loss_type).reads and not heads.estimates_states:
        raise ValueError(
            f"got loss_type {loss_type!r}, but steps of {heads.config.head_type} heads do not estimate the target's "
            "states: leave smooth_l1 out"
        )


@dataclass(frozen=True)
class _StepScore:
    """places: [M], the slots as b * T + t. losses: [M], with gradients, 0 where there is no loss. chances: [M] of the
    labels, detached; empty unless wanted. top1, top5: hits of the target's argmax."""

    places: Tensor
    losses: Tensor
    chances: Tensor
    top1: Tensor
    top5: Tensor


def _score(
    step: DraftStep,
    predicted: tuple[Tensor, Tensor],
    teacher: Teacher,
    mixture: LossMixture,
    *,
    wants_chances: bool,
    scale: float | Tensor,
    early: EarlyGradients | None,
) -> _StepScore:
    columns, places = (send(x, step.hidden.device) for x in predicted)
    rows = _ScoredRows(
        hidden=step.hidden.flatten(0, 1)[columns],
        teacher=teacher.rows.flatten()[places + step.shift - 1],
        label=teacher.labels.flatten()[places + step.shift],
        argmax=teacher.argmax.flatten()[places + step.shift - 1],
        confidence=None if step.confidence is None else step.confidence.flatten()[columns],
    )
    losses, chances = [], []
    top1 = top5 = torch.zeros_like(rows.label[:0].sum())
    chunk = rows_per_chunk(teacher.num_columns)
    for start in range(0, len(rows), chunk):
        args = (step, rows.part(start, start + chunk), teacher, mixture, wants_chances)
        if early is not None:
            loss, chance, hits1, hits5 = _early_chunk_loss(*args[:-1], scale, early)
        elif len(rows) > chunk and torch.is_grad_enabled():
            again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            loss, chance, hits1, hits5 = again(_chunk_loss, *args)
        else:
            loss, chance, hits1, hits5 = _chunk_loss(*args)
        losses.append(loss)
        chances.append(chance)
        top1, top5 = top1 + hits1, top5 + hits5
    empty = step.hidden.new_zeros(0, dtype=torch.float32)
    return _StepScore(
        places=places,
        losses=torch.cat(losses) if losses else empty,
        chances=torch.cat(chances) if chances else empty,
        top1=top1,
        top5=top5,
    )


def _d_pace(scores: Sequence[_StepScore], shape: torch.Size) -> list[Tensor]:
    """Returns the D-PACE weights [M] of every step's scored positions, from the steps that draft from the same slot of
    a batch of `shape` [B, T].

    Tokens outside the draft vocabulary have chance 0.
    """
    chances = scores[0].chances.new_zeros(len(scores), shape.numel())
    is_predicted = torch.zeros_like(chances, dtype=torch.bool)
    for k, score in enumerate(scores):
        chances[k, score.places] = score.chances
        is_predicted[k].index_fill_(0, score.places, 1)
    weights_KS = weigh_by_d_pace(chances, is_predicted)
    return [weights_S[score.places] for weights_S, score in zip(weights_KS, scores, strict=True)]


@dataclass(frozen=True)
class _ScoredRows:
    """The M scored columns of a step: those whose token is predicted.

    hidden: [M, D]. teacher: [M], rows of its logits. label, argmax: [M], draft indices or -1. confidence: [M] or None.
    """

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

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that receive gradients."""
        return [self.hidden] if self.confidence is None else [self.hidden, self.confidence]

    def detach(self) -> _ScoredRows:
        """The same rows as leaves of a new graph."""
        confidence = None if self.confidence is None else self.confidence.detach().requires_grad_()
        return replace(self, hidden=self.hidden.detach().requires_grad_(), confidence=confidence)


def _touch(step: DraftStep) -> Tensor:
    """Returns a zero whose graph goes through everything that a loss of the step would."""
    hidden = step.hidden[:1, :1]
    zero = 0.0 * step.head(hidden).float().sum()
    if step.rescore is not None:
        zero = zero + 0.0 * step.rescore(hidden, torch.zeros_like(hidden[..., :1], dtype=torch.long)).float().sum()
    return zero if step.confidence is None else zero + 0.0 * step.confidence[:1, :1].float().sum()


def _chunk_loss(
    step: DraftStep, rows: _ScoredRows, teacher: Teacher, mixture: LossMixture, wants_chances: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns losses [m] (0 for rows without one), the draft's chances of the labels if wanted, and hits of the
    target's argmax among the best 1 and 5."""
    logits = step.head(rows.hidden)
    selection = Selection.make(step, rows.hidden, logits, mixture.label_of(rows.label, rows.argmax))
    return _loss_of_logits(logits.float(), selection, rows, teacher, mixture, wants_chances)


def _early_chunk_loss(
    step: DraftStep,
    rows: _ScoredRows,
    teacher: Teacher,
    mixture: LossMixture,
    scale: float | Tensor,
    early: EarlyGradients,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_chunk_loss` without gradients: its scaled sum and its gradients go to `early`.

    On a CPU it works on a few rows at a time, so that the logits stay in the CPU's cache.
    """
    leaf = rows.detach()
    logits = step.head(leaf.hidden)
    selection = Selection.make(step, leaf.hidden, logits, mixture.label_of(rows.label, rows.argmax))
    outputs = [logits] if selection is None else [logits, selection.added]
    slopes = [torch.empty_like(output) for output in outputs]
    size = len(rows) if logits.device.type != "cpu" else max(1, BLOCK_ELEMENTS // logits.shape[1])
    found = []
    for start in range(0, len(rows), size):
        part = leaf.part(start, start + size)
        wide = [output[start : start + size].detach().float().requires_grad_() for output in outputs]
        selected = None if selection is None else selection.part(start, start + size, wide[1])
        found.append(_loss_of_logits(wide[0], selected, part, teacher, mixture, wants_chances=False))
        # Losses of the states and of the confidence reach `leaf` without the logits.
        (found[-1][0].sum() * scale).backward(inputs=[*wide, *leaf.tensors])
        for slope, own in zip(slopes, wide, strict=True):
            slope[start : start + size] = 0 if own.grad is None else own.grad  # None: only a loss of the states
    losses, chances, hits1, hits5 = zip(*found, strict=True)
    leaves = list({id(leaf): leaf for output in outputs for leaf in find_leaves(output)}.values())
    leaves = leaves or [leaf.hidden] * logits.requires_grad  # a head may return its input
    gradients = dict(zip(leaves, torch.autograd.grad(outputs, leaves, slopes), strict=True)) if leaves else {}
    for tensor, source in zip(leaf.tensors, rows.tensors, strict=True):
        reached = [x for x in (tensor.grad, gradients.pop(tensor, None)) if x is not None]
        if reached:
            gradients[source] = sum(reached[1:], reached[0])
    loss = torch.cat([loss.detach() for loss in losses])
    early.add(loss.sum() * scale, gradients.items())
    return loss, torch.cat(chances), sum(hits1, hits1[0] * 0), sum(hits5, hits5[0] * 0)


def _loss_of_logits(
    logits: Tensor,
    selection: Selection | None,
    rows: _ScoredRows,
    teacher: Teacher,
    mixture: LossMixture,
    wants_chances: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = ScoredTokens(
        logits=logits,
        teacher_logits=None if teacher.logits is None else teacher.logits[rows.teacher],
        label=rows.label,
        argmax=rows.argmax,
        hidden=rows.hidden,
        target_hidden=teacher.hidden[rows.teacher],
    )
    loss = mixture(tokens)
    if rows.confidence is not None:
        if teacher.logits is None:
            accepted = (logits.detach().argmax(-1) == rows.argmax).float()
        else:
            accepted = tokens.overlap.detach().clamp(0, 1)
        loss = loss + F.binary_cross_entropy_with_logits(rows.confidence.float(), accepted, reduction="none")
    if selection is not None:
        loss = loss + selection.loss(logits, replaces_last=not mixture.reads_labels_only)
    loss = loss * mixture.has_loss(rows.label, rows.argmax)
    with torch.no_grad():
        if selection is not None:
            logits = selection.fill(logits)
        # Among the best 5: fewer than 5 columns score above it.
        own = logits.gather(1, rows.argmax.clamp(min=0)[:, None])
        better = (logits > own).sum(-1, dtype=torch.int32)
        chances = logits[:0, 0]
        if wants_chances:
            is_known = (rows.label >= 0) & (mixture.has_loss(rows.label, rows.argmax) | (rows.argmax >= 0))
            log_q = tokens.log_q if selection is None else logits.log_softmax(-1)
            chances = log_q.gather(1, rows.label.clamp(min=0)[:, None])[:, 0].exp() * is_known
        hits = (
            (logits.argmax(-1) == rows.argmax).sum(),
            ((better < 5) & (rows.argmax >= 0) & (own[:, 0] > float("-inf"))).sum(),
        )
        return loss, chances.detach(), *hits
