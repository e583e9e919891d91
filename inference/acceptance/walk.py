"""The walk of a batch down its trees: each row's node, the scores there, and the tokens that the row emits.

Legend: B batch, N tree nodes, K depth of the tree, V target vocabulary, L length of a row's text up to the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.acceptance.sampler import Sampler


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

    With prefix-free processors nothing is read on the host. With others each `score_at` reads once which rows walk.

    Args:
        logits: [B, N, V], the target's.
        prefixes: per row [1, L] long, its tokens up to and including the root; needed by processors that read the text.
        max_tokens: per row, the number of tokens it may still emit (0: a finished row, whose counts are then 0). Such
            processors are not asked about more. None = no limit.

    Attributes:
        current: [B] long, each row's node.
        is_walking: [B] bool, whether the row emits the next token.
    """

    def __init__(
        self, sampler: Sampler, logits: Tensor, prefixes: Sequence[Tensor] | None, max_tokens: Sequence[int] | None
    ) -> None:
        assert prefixes is not None or sampler.is_prefix_free
        self.sampler, self.logits, self.prefixes, self.max_tokens = sampler, logits, prefixes, max_tokens
        self.rows = torch.arange(logits.shape[0], device=logits.device)
        self.current = torch.zeros_like(self.rows)
        self._path: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._walked: list[Tensor] = []
        self._scores: list[Tensor] = []
        self.is_walking = self._may_emit()

    def score(self) -> Tensor:
        """[B, V], the processed scores at the rows' nodes, as in plain decoding. Call it once before each step."""
        scores = self.score_at(self.current, self._tokens)
        if self.sampler.keeps_scores:
            self._scores.append(scores.float())
        return scores

    def score_at(self, nodes: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        """[B, V], the processed scores at `nodes` [B] after `tokens`, each [B]; of rows that do not walk: anything.

        Prefix-free processors run on all rows. Others run on rows that walk. Those that keep no state run on all texts
        of one length together; any other runs on each row by itself.
        """
        sampler, prefixes = self.sampler, self.prefixes
        scores = self.logits[self.rows, nodes]
        if sampler.is_prefix_free:
            return sampler.process(scores)
        assert prefixes is not None
        scores = scores.float()
        emitted = torch.stack([*tokens], dim=1) if tokens else self.rows[:, None][:, :0]
        groups: dict[int, list[int]] = {}
        for row, walks in enumerate(self.is_walking.tolist()):
            if walks:
                groups.setdefault(prefixes[row].shape[1] if sampler.keeps_nothing else row, []).append(row)
        for members in groups.values():
            texts = torch.cat([prefixes[row] for row in members])
            index = torch.tensor(members, device=self.rows.device)
            own = sampler if sampler.keeps_nothing else sampler.for_row(members[0], len(prefixes))
            scores[index] = own.process(scores[index], torch.cat([texts, emitted[index]], dim=1))
        return scores

    def step(self, tokens: Tensor, children: Tensor, is_accepted: Tensor) -> None:
        """Emits `tokens` [B] and goes on to `children` [B] long in the rows where a child [B] bool is accepted."""
        self._path.append(self.current)
        self._tokens.append(tokens)
        self._walked.append(self.is_walking)
        self.is_walking = self.is_walking & is_accepted & self._may_emit()
        self.current = children

    def _may_emit(self) -> Tensor:
        """[B] bool, whether processors that read the text may be asked about one more token."""
        may, sampler = torch.ones_like(self.rows, dtype=torch.bool), self.sampler
        if sampler.is_prefix_free:
            return may
        if self.max_tokens is not None:
            may = may & (torch.tensor(self.max_tokens, device=self.rows.device) > len(self._tokens))
        if self._tokens and sampler.eos_token_ids:
            ends = torch.tensor(sorted(sampler.eos_token_ids), device=self.rows.device)
            may = may & ~torch.isin(self._tokens[-1], ends)
        return may

    def acceptance(self) -> Acceptance:
        is_real = torch.stack(self._walked, dim=1)  # [B, K+1]
        path, tokens = (torch.stack(entries, dim=1) * is_real for entries in (self._path, self._tokens))
        scores = torch.stack(self._scores, dim=1) if self._scores else None
        return Acceptance(path, is_real.sum(1), tokens, scores)
