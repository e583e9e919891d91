"""Measures how often each candidate of a drafter is right, from which a measured static tree is built.

Legend: B batch, T sequence length, C draft vocabulary, K depths, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.heads.modules.host_tensors import read_on_host, send
from draftsmith.training.features.encoding import encode
from draftsmith.training.losses.teacher import compute_teacher, rows_per_chunk


@torch.inference_mode()
def measure_rank_accuracy(heads: DraftHeads, batches: Iterable[dict[str, Tensor]], *, num_ranks: int) -> Tensor:
    """Returns the share of positions where the heads' candidate of rank r at depth d + 1 is the target's own token.

    The path before it consists of the data's tokens. For heads that read the path, the accuracy of a depth is
    conditional on a right parent; for independent heads (Medusa) it is the marginal, as in the paper.

    Args:
        heads: bound to their target.
        batches: of `draftsmith.training.data.collation.ConversationCollator`; only positions of the loss mask count.
        num_ranks: R; ranks beyond the draft vocabulary are never right.

    Returns:
        [K, R] float64.
    """
    target, hits, positions = heads.target, None, None
    for batch in batches:
        input_ids, loss_mask = batch["input_ids"].to(target.device), read_on_host(batch["loss_mask"])
        encoded = encode(target, input_ids, batch["attention_mask"], feature_layers=heads.feature_layers)
        teacher = compute_teacher(
            target, encoded.last_hidden, input_ids, loss_mask, heads.draft_token_ids, loss_type="cross_entropy"
        )
        steps = heads.unroll_where(encoded.features, input_ids, loss_mask)
        if hits is None or positions is None:
            hits = torch.zeros(len(steps), num_ranks, dtype=torch.float64)
            positions = torch.zeros(len(steps), 1, dtype=torch.float64)
        chunk = rows_per_chunk(teacher.num_columns)
        for depth, step in enumerate(steps):
            columns, places = (send(x, target.device) for x in step.find_predicted(loss_mask))
            wanted = teacher.argmax.flatten()[places + step.shift - 1]
            hidden = step.hidden.flatten(0, 1)[columns]
            for start in range(0, len(hidden), chunk):  # the logits of all positions can be gigabytes
                part = slice(start, start + chunk)
                scores, best = step.score(hidden[part]).topk(min(num_ranks, teacher.num_columns), dim=-1)
                is_hit = (best == wanted[part, None]) & ~scores.isneginf()
                hits[depth, : best.shape[-1]] += is_hit.sum(0).double().cpu()
            positions[depth] += wanted.numel()
    if hits is None or positions is None or not positions.all():
        raise ValueError("no position to measure on: give conversations with longer replies")
    return hits / positions
