"""The slots of a sequence from which drafting is trained, for kinds that do not train at all of them.

Legend: B batch, T sequence length, A slots drawn.
"""

import torch
from torch import Tensor

GOLDEN_RATIO = 0.6180339887498949


def draw_slots(loss_mask: Tensor, most: int, token_seeds: Tensor | None = None) -> Tensor:
    """Draws slots to train drafting from: [B, A] int64, -1 for padding; A is at most `most`.

    They are in the order drawn, padding last, so that the first few are a draw as well. A slot t may be drawn if the
    first token it drafts, at t + 2, has a loss: drafting never starts within a prompt.

    Args:
        loss_mask: [B, T] on the host, 1 where a token is to be predicted.
        token_seeds: [B, T] int64 on the host, random: the slots with the lowest ones are drawn. None = the slots are
            always the same. Either way a row's draw depends neither on its padding nor on the other rows.
    """
    batch, length = loss_mask.shape
    may_be_drawn = loss_mask[:, 2:].bool()
    # No more than the row with most: saves the work on prompts and padding, often half of it.
    count = int(may_be_drawn.sum(1).max()) if may_be_drawn.numel() else 0
    if count == 0:
        return torch.full((batch, 1), -1, dtype=torch.long, device=loss_mask.device)
    if token_seeds is None:  # any number of these multiples is spread evenly
        ranks = (torch.arange(length - 2, device=loss_mask.device) * GOLDEN_RATIO) % 1
    else:
        ranks = token_seeds[:, : length - 2].double()
    ranks = ranks.expand_as(may_be_drawn).masked_fill(~may_be_drawn, torch.inf)
    lowest, slots = ranks.topk(min(most, count), dim=1, largest=False)
    return slots.masked_fill(lowest == torch.inf, -1)
