"""DraftStep: one drafting step over a batch, in the form that losses read; also for packed batches.

Legend: B batch, T sequence length, M slots that a step drafts from (all T, or the drawn ones), R documents of a group,
L length of its rows, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from draftsmith.heads.modules.documents import DocumentGroup, split_documents


@dataclass(frozen=True)
class DraftStep:
    """One drafting step of an unroll over a whole sequence: from slot t it predicts the token at t + shift.

    Attributes:
        shift: >= 2; slot t holds the feature of t, and token t + 1 is accepted when drafting starts.
        hidden: [B, M, D], the input of `head`; D is the kind's own.
        head: maps [..., D] to logits [..., C] over `draft_token_ids` (the target's vocabulary when that is None).
        slots: [B, M] int64 on the host, the slot of each column of `hidden`, -1 for padding; None = column t is slot t
            (M = T).
        confidence: [B, M] logits of the chance that the step's token is accepted; None = the kind has no such head.
        document_ids: [B, T] on the host, of a packed batch (see `unroll_documents`). Its steps have one row of columns,
            [1, M], in which b * T + t is slot t of row b. None = one document per row.
        rescore: maps states [..., D] and candidates [..., k] to what is added to their logits. Drafts are then the
            best `num_candidates` tokens by `head`, in the order of these sums; None = `head` has the last word.
    """

    shift: int
    hidden: Tensor
    head: Callable[[Tensor], Tensor]
    slots: Tensor | None = None
    confidence: Tensor | None = None
    document_ids: Tensor | None = None
    rescore: Callable[[Tensor, Tensor], Tensor] | None = None
    num_candidates: int = 0

    def score(self, hidden: Tensor) -> Tensor:
        """[..., D] -> the scores [..., C] of drafts, -inf for tokens that are not drafted."""
        logits = self.head(hidden)
        if self.rescore is None:
            return logits
        best, ids = logits.topk(min(self.num_candidates, logits.shape[-1]), dim=-1)
        return torch.full_like(logits, float("-inf")).scatter(
            -1, ids, (best + self.rescore(hidden, ids)).to(logits.dtype)
        )

    def find_predicted(self, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The columns whose predicted token has a loss by the mask [B, T] on the host: their indices in the flattened
        `hidden` [B * M, D], and their slots as b * T + t. Both are on the host."""
        columns = self.read_ahead(loss_mask, self.shift).flatten().nonzero()[:, 0]
        if self.slots is None:
            return columns, columns
        length, rows = loss_mask.shape[1], torch.arange(len(self.slots))
        return columns, (self.slots + rows[:, None] * length).flatten()[columns]

    def read_ahead(self, values: Tensor, distance: int, fill: int = 0) -> Tensor:
        """[B, M]: for every column, the entry of `values` [B, T] at its slot + `distance`; `fill` for padding, and past
        the end of the row or of the slot's document.

        Worked example: slots [0, 3, -1] of values [5, 6, 7, 8, 9] at distance 2 read [7, fill, fill].
        """
        length = values.shape[1]
        if self.slots is None:
            ahead = values[:, distance:]
            return nn.functional.pad(ahead, (0, self.hidden.shape[1] - ahead.shape[1]), value=fill)
        slots = self.slots.to(values.device)
        places, is_outside = slots + distance, slots < 0
        if self.document_ids is not None:
            is_outside = is_outside | (slots.clamp(min=0) % length + distance >= length)
            values, ids = values.reshape(1, -1), self.document_ids.reshape(1, -1).to(values.device)
            length = values.shape[1]
            own, there = (ids.gather(1, x.clamp(0, length - 1)) for x in (slots, places))
            is_outside = is_outside | (own != there)
        read = values.gather(1, places.clamp(0, length - 1))
        return read.masked_fill(is_outside | (places >= length), fill)


def unroll_documents(
    unroll: Callable[[Tensor, Tensor, Tensor, Tensor | None], list[DraftStep]],
    document_ids: Tensor,
    num_groups: int | None,
    features: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    token_seeds: Tensor | None,
) -> list[DraftStep]:
    """The steps of a packed batch [B, T], each of whose documents is unrolled by itself.

    Args:
        unroll: unrolls a group of documents as rows of [R, L]; it gets the last four arguments of the group.
        document_ids, loss_mask, token_seeds: on the host.
        num_groups: as in `split_documents`.
    """
    groups = split_documents(document_ids, num_groups=num_groups)
    unrolled = []
    for group in groups:
        mask, seeds = group.read(loss_mask) * group.mask, None if token_seeds is None else group.read(token_seeds)
        unrolled.append(unroll(group.read(features), group.read(input_ids), mask, seeds))
    joined = []
    for steps in zip(*unrolled, strict=True):
        slots = torch.cat([_find_slots(group, step) for group, step in zip(groups, steps, strict=True)])
        hidden = torch.cat([step.hidden.flatten(0, 1) for step in steps])
        confidence = [step.confidence.flatten() for step in steps if step.confidence is not None]
        joined.append(
            replace(
                steps[0],
                hidden=hidden[None],
                slots=slots[None],
                confidence=torch.cat(confidence)[None] if confidence else None,
                document_ids=document_ids,
            )
        )
    return joined


def count_predicted(
    choose_slots: Callable[[Tensor, Tensor], list[Tensor | None]],
    loss_mask: Tensor,
    token_seeds: Tensor,
    document_ids: Tensor | None,
    *,
    num_groups: int | None,
) -> Tensor:
    """[K] int64: how many tokens each step predicts in a batch (`DraftStep.find_predicted`), known before it runs.

    Args:
        choose_slots: `DraftHeads.choose_slots`.
        loss_mask, token_seeds: [B, T] on the host.
        document_ids: likewise, of a packed batch; None = one document per row.
        num_groups: as in `split_documents`.
    """
    rows = [(loss_mask, token_seeds)]
    if document_ids is not None:
        groups = split_documents(document_ids, num_groups=num_groups)
        rows = [(group.read(loss_mask) * group.mask, group.read(token_seeds)) for group in groups]
    counts = []
    for mask, seeds in rows:
        steps = [DraftStep(2 + k, mask, nn.Identity(), slots) for k, slots in enumerate(choose_slots(mask, seeds))]
        counts.append(torch.stack([step.read_ahead(mask, step.shift).count_nonzero() for step in steps]))
    return torch.stack(counts).sum(0)


def check_counted(steps: list[DraftStep], counts: Tensor | None) -> list[DraftStep]:
    """The steps. Refuses those that `count_predicted` counted as others: a kind from outside may say something else."""
    shifts, counted = [step.shift for step in steps], [] if counts is None else [*range(2, 2 + len(counts))]
    if counts is not None and shifts != counted:
        raise ValueError(
            f"the heads' unroll gave steps of shifts {shifts}, and {counted} were counted: step k has shift 2 + k, and "
            "num_unrolled_steps is their number"
        )
    return steps


def _find_slots(group: DocumentGroup, step: DraftStep) -> Tensor:
    """The slot in the batch of each column of a group's step, -1 for padding: [R * M]."""
    if step.slots is None:
        return group.places.masked_fill(group.mask == 0, -1).flatten()
    slots = step.slots.clamp(min=0)
    is_padding = (step.slots < 0) | (group.mask.gather(1, slots) == 0)
    return group.places.gather(1, slots).masked_fill(is_padding, -1).flatten()
