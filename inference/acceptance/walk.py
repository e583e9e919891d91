"""The walk of a batch down its trees: each row's node, the scores there, and the tokens that the row emits.

Legend: B batch, N tree nodes, K depth of the tree, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.acceptance.sampler import Sampler


@dataclass(frozen=True)
class Acceptance:
    """The result of one verify step.

    Worked example, the tree of TokenTree's docstring, when the target says "cat" after the root, "ran" after "cat" and
    "away" after "ran":

        path         0  1  4      the root, "cat", "ran"
        counts       3
        next_tokens  cat  ran  away

    Attributes:
        path: [B, K+1] long, accepted nodes, root first; entries from counts[b] on are 0 (padding).
        counts: [B] long, nodes on the path, root included (>= 1). It is also the number of tokens emitted.
        next_tokens: [B, K+1] long, accepted drafted tokens, then the bonus token; entries from counts[b] on are 0.
            `NO_TOKEN` where none could be picked.
        scores: [B, K+1, V] float32, the target's processed scores that gave the tokens (from counts[b] on:
            anything), if the sampler keeps them.
    """

    path: Tensor
    counts: Tensor
    next_tokens: Tensor
    scores: Tensor | None = None


class Walk:
    """All rows, each at one node; a step takes them one level down. Rows that have ended go on, and emit padding.

    Nothing is read on the host, except with lazy processors: each `score` reads once which rows walk. Lazy processors
    are not asked about more tokens than plain decoding would emit.

    Args:
        logits: [B, N, V], the target's.

    Attributes:
        current: [B] long, each row's node.
        is_walking: [B] bool, whether the row emits the next token.
    """

    def __init__(self, sampler: Sampler, logits: Tensor) -> None:
        self.sampler, self.logits, self._texts = sampler, logits, sampler.texts
        self.rows = torch.arange(logits.shape[0], device=logits.device)
        self.current = torch.zeros_like(self.rows)
        self._path: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._walked: list[Tensor] = []
        self._scores: list[Tensor] = []
        self.is_walking = self._may_emit()

    def score(self) -> Tensor:
        """[B, V], the processed scores at the rows' nodes, as in plain decoding. Call it once before each step."""
        scores = self.sampler.process(self.logits[self.rows, self.current], self._texts, self.is_walking)
        if self.sampler.keeps_scores:
            self._scores.append(scores.float())
        return scores

    def step(self, tokens: Tensor, children: Tensor, is_accepted: Tensor) -> None:
        """Emits `tokens` [B] and goes on to `children` [B] long in the rows where a child [B] bool is accepted."""
        self._path.append(self.current)
        self._tokens.append(tokens)
        self._walked.append(self.is_walking)
        if self._texts is not None:
            self._texts = self._texts.extended(tokens)
        self.is_walking = self.is_walking & is_accepted & self._may_emit()
        self.current = children

    def _may_emit(self) -> Tensor:
        """[B] bool, whether lazy processors may be asked about one more token."""
        sampler = self.sampler
        if not sampler.is_lazy or self._texts is None:
            return torch.ones_like(self.rows, dtype=torch.bool)
        may = self._texts.lengths < self._texts.limits
        return may & ~sampler.are_ends(self._tokens[-1]) if self._tokens else may

    def acceptance(self) -> Acceptance:
        is_real = torch.stack(self._walked, dim=1)  # [B, K+1]
        path, tokens = (torch.stack(entries, dim=1) * is_real for entries in (self._path, self._tokens))
        scores = torch.stack(self._scores, dim=1) if self._scores else None
        return Acceptance(path, is_real.sum(1), tokens, scores)
