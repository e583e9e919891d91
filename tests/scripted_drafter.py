"""A drafter with teeth: it knows the true continuation and mixes it with decoys at chosen nodes.

Random heads accept almost nothing, so they test little. This one makes every depth, branch, commit and trim happen: at
each position a schedule says at which rank the true token stands among the candidates, or that it is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference import DraftLogits


@dataclass
class ScriptedState:
    """lengths: [B] certain slots. is_true: [B, W] whether each frontier node's path is the true continuation."""

    lengths: Tensor
    is_true: Tensor


@dataclass
class ScriptedDrafter:
    """Drafts for rows whose full texts are known.

    Args:
        texts: per row, prompt and continuation [length].
        vocab_size: V.
        ranks: the true token's rank at a position is one of these (by the position's hash); num_candidates or more =
            missing.
        num_candidates: C real candidates a node; the others are decoys.
        feature_layers: asked for, so that features flow as they do for heads; their values are checked by shape only.
    """

    texts: list[Tensor]
    vocab_size: int
    ranks: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 9)
    num_candidates: int = 4
    feature_layers: tuple[int, ...] = (1, 2)
    max_depth: int | None = None
    offered: set[tuple[int, int]] = field(default_factory=set)

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> ScriptedState:
        assert batch_size == len(self.texts)
        return ScriptedState(torch.zeros(batch_size, dtype=torch.long), torch.ones(batch_size, 1, dtype=torch.bool))

    def extend(
        self, state: ScriptedState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        assert (features is not None) == bool(self.feature_layers)
        assert features is None or features.shape[:2] == next_token_ids.shape
        for row, text in enumerate(self.texts):
            start, count = int(state.lengths[row]), int(counts[row])
            # The slots handed over must be the true text, one token ahead of their features.
            taken = next_token_ids[row, :count]
            expected = text[start + 1 : start + 1 + count]
            assert torch.equal(taken[: len(expected)], expected), f"row {row} was given other tokens than its text"
        state.lengths = state.lengths + counts
        assert int(state.lengths.max()) <= max_slots
        state.is_true = torch.ones(len(self.texts), 1, dtype=torch.bool)
        return self._candidates(state, depth=0)

    def expand(self, state: ScriptedState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        truth = torch.stack([self._token(row, int(state.lengths[row]) + depth) for row in range(len(self.texts))])
        state.is_true = state.is_true.gather(1, parents) & (token_ids == truth[:, None])
        return self._candidates(state, depth)

    def _token(self, row: int, position: int) -> Tensor:
        text = self.texts[row]
        return text[min(position, len(text) - 1)]

    def _candidates(self, state: ScriptedState, depth: int) -> DraftLogits:
        """Log-scores falling by rank, so that all candidates stand near each other in a dynamic tree's re-rank."""
        batch, width = state.is_true.shape
        logits = torch.full((batch, width, self.vocab_size), float("-inf"))
        for row in range(batch):
            position = int(state.lengths[row]) + depth + 1  # of the children
            truth = int(self._token(row, position))
            generator = torch.Generator().manual_seed(1000 * row + position)
            rank = self.ranks[int(torch.randint(len(self.ranks), (), generator=generator))]
            decoys = [int(t) for t in torch.randperm(self.vocab_size, generator=generator) if int(t) != truth]
            for node in range(width):
                tokens = decoys[: self.num_candidates]
                if bool(state.is_true[row, node]) and rank < self.num_candidates:
                    tokens[rank] = truth
                    self.offered.add((depth, rank))
                for place, token in enumerate(tokens):
                    logits[row, node, token] = -1.2 * place
        return DraftLogits(logits)
