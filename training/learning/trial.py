"""How many drafts in a row would have been right at every slot of texts: what weights are compared by.

Legend: N slots, K depths.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.training.learning.buffer import TextBatch
from draftsmith.training.losses.teacher import rows_per_chunk

DEPTHS_OF_ONE = 4  # that are looked at where one step serves all depths


@torch.no_grad()
def measure_acceptance(
    steps: Sequence[DraftStep], batch: TextBatch, draft_token_ids: Tensor | None, *, serves_all_depths: bool
) -> float:
    """The mean acceptance length of chains that begin at every slot, the target's own token included.

    Args:
        serves_all_depths: there is one step for all depths (`DraftHeads.runs_target_layers`).

    A depth counts if the heads' best token, and that of every depth before, is the text's. Below a right token the
    steps of an unroll read what the drafter would read.
    """
    mask, ids = batch.loss_mask, batch.input_ids.flatten()
    hits = torch.zeros(max(len(steps), 1), ids.numel(), dtype=torch.bool, device=ids.device)
    begins = torch.zeros_like(hits[0])
    for hit, step in zip(hits, steps, strict=True):
        columns, places = (x.to(ids.device) for x in step.find_predicted(mask))
        hidden, labels = step.hidden.flatten(0, 1)[columns], ids[places + step.shift]
        for part in torch.arange(len(columns)).split(rows_per_chunk(step.head(hidden[:1]).shape[-1])):
            best = step.score(hidden[part]).argmax(-1)
            tokens = best if draft_token_ids is None else draft_token_ids[best]
            hit[places[part]] = tokens == labels[part]
        if step is steps[0]:
            begins[places] = True
    if serves_all_depths:
        hits = torch.stack([torch.nn.functional.pad(hits[0, k:], (0, k)) for k in range(DEPTHS_OF_ONE)])
    lengths = hits.long().cumprod(0).sum(0)[begins]
    return 1.0 + lengths.double().mean().item() if len(lengths) else 1.0
