"""The selector of DFlash 2 (Inco AI and z-lab 2026): scores of a token after another one.

Legend: R rank, V target vocabulary, D hidden size, k candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CandidateSelector(nn.Module):
    """(A[a] * H h) . B[b], which is added to the logit of a candidate b after a token a, at a row with state h.

    B starts at zero. A starts from small random numbers, as in published trainers.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_embedding = nn.Embedding(vocab_size, rank)
        self.successor_embedding = nn.Embedding(vocab_size, rank)
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        nn.init.normal_(self.predecessor_embedding.weight, std=0.02)
        nn.init.zeros_(self.successor_embedding.weight)

    def pair(self, hidden: Tensor, before: Tensor) -> Tensor:
        """States [..., D] and the tokens before them [...] -> A[a] * H h [..., R]."""
        paired: Tensor = self.predecessor_embedding(before) * self.hidden_projection(hidden)
        return paired

    def score(self, paired: Tensor, token_ids: Tensor) -> Tensor:
        """The result of `pair` [..., R], and candidates [..., k] -> [..., k]."""
        return torch.einsum("...r,...kr->...k", paired, self.successor_embedding(token_ids))
