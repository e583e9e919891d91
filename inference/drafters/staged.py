"""StagedDrafter: n-grams draft for the small model that drafts (Spector and Re, arXiv 2308.04623, section 3.2).

Legend: B batch, S slots of one call, G guesses, Vs the small model's vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.ngram import NgramDrafter, NgramState
from draftsmith.inference.drafters.row_state import RowState
from draftsmith.inference.drafters.small_model import SmallModelDrafter, SmallModelState
from draftsmith.inference.targets.target import Target


@dataclass
class StagedState(RowState):
    """The state of one batch.

    Attributes:
        small, ngram: the two drafters' states.
        is_active: [B] bool, rows that got slots in the last `extend`.
        logits: [B, 1 + G, Vs] of the small model's last pass, after its first token and after each guess.
        guesses: [B, G] int64, -1 = none.
        first_depth: the depth of that pass's first token (0 = the root).
    """

    small: SmallModelState
    ngram: NgramState
    is_active: Tensor
    logits: Tensor
    guesses: Tensor
    first_depth: int
    row_fields = ("small", "ngram")


class StagedDrafter(Drafter, nn.Module):
    """Drafts chains with a small model, and saves passes of it by n-grams.

    Each pass of the small model also reads the continuation that n-grams of the text guess. While the decode loop picks
    the guessed tokens, the small model's scores are known and need no pass. The scores are always exactly the small
    model's; guesses only save passes.

    The host decides at each level whether a pass is needed, so no runner can take this drafter's work over.

    Args:
        small: the small model's drafter.
        ngrams: guesses the continuation.
        num_guesses: G.
    """

    drafts_chains_only = True
    can_copy_rows = True
    reads_first_token = True

    def __init__(self, small: SmallModelDrafter, ngrams: NgramDrafter | None = None, *, num_guesses: int = 4) -> None:
        super().__init__()
        if not isinstance(small, SmallModelDrafter):
            raise TypeError(f"small is a {type(small).__name__}; give SmallModelDrafter(model)")
        if num_guesses < 1:
            raise ValueError(
                f"num_guesses is {num_guesses}; allowed is 1 or more (a SmallModelDrafter drafts without guesses)"
            )
        self.small = small
        self.ngrams = (ngrams or NgramDrafter()).for_target(small.small)
        self.num_guesses = num_guesses

    @property
    def config(self) -> Any:
        return self.small.config

    @property
    def dtype(self) -> torch.dtype:
        return self.small.dtype

    def for_target(self, target: Target) -> StagedDrafter:
        small = self.small.for_target(target)
        if small is self.small:
            return self
        view = copy.copy(self)
        view._modules = {**self._modules, "small": small}
        return view

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> StagedState:
        small = self.small.start(batch_size, max_length, num_scratch + self.num_guesses)
        device = small.cache.lengths.device
        guesses = torch.full((batch_size, self.num_guesses), -1, device=device)
        ngrams = self.ngrams.start(batch_size, max_length, num_scratch)
        return StagedState(small, ngrams, guesses[:, 0] > 0, torch.empty(0, device=device), guesses, 0)

    def read_source(self, state: StagedState, token_ids: Tensor, mask: Tensor) -> None:
        self.small.read_source(state.small, token_ids, mask)

    def read_first(self, state: StagedState, token_ids: Tensor) -> None:
        self.small.read_first(state.small, token_ids)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def extend(
        self, state: StagedState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        draft = self.ngrams.extend(state.ngram, None, next_token_ids, counts, max_slots=max_slots)
        state.guesses = self._guess(state.ngram, draft, 1)
        state.is_active, state.first_depth = counts > 0, 0
        token_ids = nn.functional.pad(next_token_ids, (0, self.num_guesses))
        places = counts[:, None] + torch.arange(self.num_guesses, device=counts.device)
        token_ids = token_ids.scatter(1, places, state.guesses.clamp(min=0))
        state.logits = self.small.read_committed(
            state.small, token_ids, counts, max_tokens=max_slots + 1, num_guesses=self.num_guesses
        )
        return self.small.to_draft(state.logits[:, :1])

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def expand(self, state: StagedState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        assert token_ids.shape[1] == 1, "a chain"
        own = self.ngrams.expand(state.ngram, token_ids, parents, depth)
        place = depth - state.first_depth
        if place <= self.num_guesses:
            is_guess = state.guesses[:, place - 1] == token_ids[:, 0]
            # Without active rows (costs are measured so) every level makes its pass.
            if bool((is_guess | ~state.is_active).all() & state.is_active.any()):
                return self.small.to_draft(state.logits[:, place : place + 1])
        state.guesses, state.first_depth = self._guess(state.ngram, own, depth + 1), depth
        state.logits = self._read_drafted(state.small, torch.cat([token_ids, state.guesses.clamp(min=0)], 1), depth)
        return self.small.to_draft(state.logits[:, :1])

    def _guess(self, state: NgramState, draft: DraftLogits, depth: int) -> Tensor:
        """The n-grams' own chain of G tokens [B, G] after a node, -1 where they have no continuation.

        Args:
            draft: the scores of the node's children.
            depth: of the children.
        """
        state = copy.copy(state)  # guesses do not lengthen the drafted path
        guesses: list[Tensor] = []
        is_known: Tensor | None = None
        for place in range(self.num_guesses):
            assert draft.token_ids is not None
            best, column = draft.logits[:, 0].max(-1, keepdim=True)  # [B, 1]
            token_ids = draft.token_ids[:, 0].gather(1, column)
            is_known = best > -torch.inf if is_known is None else is_known & (best > -torch.inf)
            guesses.append(torch.where(is_known, token_ids, -1))
            if place + 1 < self.num_guesses:
                draft = self.ngrams.expand(state, token_ids, torch.zeros_like(token_ids), depth + place)
        return torch.cat(guesses, dim=1)

    def _read_drafted(self, state: SmallModelState, token_ids: Tensor, depth: int) -> Tensor:
        """One pass over a drafted token of this depth and the guesses after it, [B, 1 + G]: logits [B, 1 + G, Vs]."""
        batch, width = token_ids.shape
        nodes = torch.arange(state.tree.depths.shape[0], device=token_ids.device)  # node r of a chain is tree row r
        own = nodes[depth - 1 : depth - 1 + width]
        state.cache.open_level(own)
        ancestors = (nodes <= own[:, None]).expand(batch, -1, -1)
        return self.small.small.score_opened(
            state.cache, self.small.to_small_ids(token_ids), own.expand(batch, -1), ancestors, tree_depths=nodes[None]
        )
