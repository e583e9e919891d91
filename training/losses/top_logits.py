"""A small teacher: the target's best logits at every position, and the log-sum-exp of all.

Legend: ... positions in any shape, P positions whose next token is predicted, K best tokens, V target vocabulary,
C draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TopLogits:
    """values: [..., K], the target's largest logits, falling. token_ids: [..., K] int64, their tokens.
    log_sum_exp: [...] float32, of the logits of all V tokens."""

    values: Tensor
    token_ids: Tensor
    log_sum_exp: Tensor

    def select(self, where: Tensor) -> TopLogits:
        """Selects the positions where a bool mask is true: [P, K] and [P]."""
        return TopLogits(self.values[where], self.token_ids[where], self.log_sum_exp[where])


def take_top_logits(logits: Tensor, top_k: int) -> TopLogits:
    """Takes the best of logits [..., V]."""
    values, token_ids = logits.topk(top_k, dim=-1)
    return TopLogits(values, token_ids, logits.float().logsumexp(-1))


def restore_logits(top: TopLogits, draft_token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Returns logits [P, C] over the draft vocabulary (None: all V tokens).

    The K stored logits are exact. All others have one value, chosen so that each row's log-sum-exp over V is the stored
    one: the softmax gives the stored tokens their exact probabilities, and the V - K others equal shares of the rest.
    Where rounding leaves no rest, it is the float32 epsilon.

    Worked example: with K = 2, probabilities (0.5, 0.3, 0.1, 0.1) and (0.5, 0.3, 0.2, 0) both become
    (0.5, 0.3, 0.1, 0.1).
    """
    num_rest = vocab_size - top.values.shape[-1]
    chance_PK = (top.values.float() - top.log_sum_exp[:, None]).exp()
    rest_P = (1 - chance_PK.sum(-1)).clamp(min=torch.finfo(torch.float32).eps)
    share_P = (rest_P / max(num_rest, 1)).log() + top.log_sum_exp
    # A token outside the best K is no likelier than the last of them.
    share_P = torch.minimum(share_P, top.values[:, -1].float())
    num_columns = vocab_size if draft_token_ids is None else draft_token_ids.numel()
    logits_PC = share_P.to(top.values.dtype)[:, None].repeat(1, num_columns + 1)  # the last column is a dummy
    columns_PK = top.token_ids
    if draft_token_ids is not None:
        index = torch.full((vocab_size,), num_columns, dtype=torch.long, device=columns_PK.device)
        index[draft_token_ids] = torch.arange(num_columns, device=columns_PK.device)
        columns_PK = index[columns_PK]
    return logits_PC.scatter_(1, columns_PK, top.values)[:, :-1]
