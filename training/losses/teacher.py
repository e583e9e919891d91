"""The teacher of a training batch: the target's distribution at the positions whose next token is predicted.

Legend: B batch, T sequence length, P positions whose next token is predicted, C draft vocabulary, V target vocabulary,
D hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.heads.modules.host_tensors import OnHost, read_on_host, send
from draftsmith.inference.targets.target import Target
from draftsmith.training.losses.terms import parse_loss

CHUNK_ELEMENTS = 2**25  # size of the largest float32 logits tensor: 128 MiB


def rows_per_chunk(num_columns: int) -> int:
    """Returns the number of rows, each of `num_columns` logits, that fit into `CHUNK_ELEMENTS`."""
    return max(1, CHUNK_ELEMENTS // num_columns)


@dataclass(frozen=True)
class Teacher:
    """The target's view of a batch, at the P positions whose next token is predicted.

    Attributes:
        logits: [P, C] over the draft vocabulary, in the target's dtype; None if no loss needs it.
        hidden: [P, D] the input of the target's LM head, in the target's dtype.
        rows: [B, T] int64, a position's row of `logits` and `hidden`; 0 elsewhere.
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
    loss_mask: Tensor | OnHost,
    draft_token_ids: Tensor | None,
    *,
    loss_type: str,
) -> Teacher:
    """Runs the target's LM head only where needed and in chunks, so that no [B, T, V] float32 tensor is ever alive.

    Args:
        last_hidden: [B, T, D] the target's post-norm states.
        loss_mask: [B, T] on the host (which otherwise waits for the device), 1 where x_t is to be predicted.
        draft_token_ids: [C] target ids of the draft vocabulary; None = all.
        loss_type: as in `draft_loss`; some losses need no logits.
    """
    num_columns = target.vocab_size if draft_token_ids is None else draft_token_ids.numel()
    device = last_hidden.device
    places_P = send(F.pad(read_on_host(loss_mask)[:, 1:], (0, 1)).flatten().nonzero()[:, 0], device)
    hidden_PD = last_hidden.flatten(0, 1)[places_P]
    needs_logits = parse_loss(loss_type).needs_distribution
    argmax_P, logits_PC = _score(target, hidden_PD, draft_token_ids, needs_logits=needs_logits)
    labels = input_ids
    if draft_token_ids is not None:
        index = torch.full((target.vocab_size,), -1, dtype=torch.long, device=device)
        index[draft_token_ids] = torch.arange(num_columns, device=device)
        argmax_P, labels = index[argmax_P], index[input_ids]
    argmax_BT, rows_BT = torch.full_like(input_ids, -1), torch.zeros_like(input_ids)
    argmax_BT.view(-1)[places_P] = argmax_P
    rows_BT.view(-1)[places_P] = torch.arange(len(places_P), device=device)
    return Teacher(logits_PC, hidden_PD, rows_BT, argmax_BT, labels, num_columns)


def _score(
    target: Target, hidden_PD: Tensor, draft_token_ids: Tensor | None, *, needs_logits: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the best of all tokens [P], and the logits [P, C] over the draft vocabulary if needed."""
    num_columns = target.vocab_size if draft_token_ids is None else draft_token_ids.numel()
    argmax_P = torch.empty(hidden_PD.shape[0], dtype=torch.long, device=hidden_PD.device)
    logits_PC = hidden_PD.new_empty(hidden_PD.shape[0], num_columns) if needs_logits else None
    chunk = rows_per_chunk(target.vocab_size)
    for start in range(0, hidden_PD.shape[0], chunk):
        part = slice(start, start + chunk)
        full = target.compute_logits(hidden_PD[part])
        argmax_P[part] = full.argmax(-1)
        if logits_PC is not None:
            logits_PC[part] = full if draft_token_ids is None else full[:, draft_token_ids]
    return argmax_P, logits_PC
