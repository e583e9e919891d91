"""The loss of a selector, which orders a step's candidates (DFlash 2): the cross-entropy over them, with weight 1.

Its label is the data's token for losses of only the data's tokens (as in NVIDIA's Automodel), and otherwise the
target's best token (as in speculators).

Legend: M scored positions, C draft vocabulary, k candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.heads import DraftStep


@dataclass(frozen=True)
class Selection:
    """A step's candidates at M positions, and after them the token to be learned.

    Attributes:
        token_ids: [M, k + 1] int64.
        added: [M, k + 1], the selector's part of their scores, with gradients.
    """

    token_ids: Tensor
    added: Tensor

    @classmethod
    def make(cls, step: DraftStep, hidden: Tensor, logits: Tensor, label: Tensor) -> Selection | None:
        """label: [M], -1 where there is none. None: the step has no selector."""
        if step.rescore is None:
            return None
        best = logits.detach().topk(min(step.num_candidates, logits.shape[-1]), dim=-1).indices
        token_ids = torch.cat([best, label.clamp(min=0)[:, None]], dim=-1)
        return cls(token_ids, step.rescore(hidden, token_ids))

    def part(self, start: int, end: int, added: Tensor) -> Selection:
        """Some of the positions, with these sums."""
        return Selection(self.token_ids[start:end], added)

    def scores(self, logits: Tensor) -> Tensor:
        """[M, k + 1], from the logits [M, C] without a selector."""
        return logits.gather(1, self.token_ids) + self.added.float()

    def loss(self, logits: Tensor, *, replaces_last: bool) -> Tensor:
        """[M] cross-entropy of the label among k candidates. Where the label is none of them, it takes the place of the
        last one, as in speculators (`replaces_last`), or the loss is 0, as in NVIDIA's Automodel."""
        scores = self.scores(logits)
        drafted, own = scores[:, :-1], scores[:, -1]
        is_drafted = (self.token_ids[:, :-1] == self.token_ids[:, -1:]).any(-1)
        last = torch.where(is_drafted, drafted[:, -1], own)
        loss = torch.cat([drafted[:, :-1], last[:, None]], dim=-1).logsumexp(-1) - own
        return loss if replaces_last else loss * is_drafted

    @torch.no_grad()
    def fill(self, logits: Tensor) -> Tensor:
        """[M, C] scores of what is drafted, -inf elsewhere."""
        drafted = self.scores(logits)[:, :-1]
        return torch.full_like(logits, float("-inf")).scatter(1, self.token_ids[:, :-1], drafted)
