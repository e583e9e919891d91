"""The Drafter protocol: everything the decode loop knows about whatever proposes tokens.

Legend: B batch, S slots handed over, W frontier nodes of one tree level, C candidate columns, F feature width.

Draft slot t pairs the target's feature of position t with the token at position t + 1 (EAGLE, arXiv 2401.15077,
section 3.1); a drafter that needs only one of the two ignores the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from inference.cache.tree_cache import TreeCache

if TYPE_CHECKING:
    from inference.drafters.draws import DraftDraws


@dataclass(frozen=True)
class DraftLogits:
    """Scores for the children of W frontier nodes.

    Attributes:
        logits: [B, W, C], or [B, 1, C] when every frontier node shares them; unnormalised log-probabilities of any
            floating dtype. A column of -inf is no candidate.
        token_ids: the target's token id of each column: None (the column number is the id), [C], or [B, W, C]; int64.
        confidence: [B, W or 1] float32, from 0 to 1, the drafter's own word on how far its scores are to be trusted;
            None = 1. Only `MergedDrafter` asks.
    """

    logits: Tensor
    token_ids: Tensor | None = None
    confidence: Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """What the decode loop asks of a drafter. Trained heads implement it, and so do drafters that are not trained.

    The first token of a text is in no slot. A drafter that needs it has a method `read_first(state, token_ids [B])`,
    which is called once, between `start` and the first `extend`. One that reads the source texts of an encoder-decoder
    target has a method `read_source(state, token_ids [B, E], mask [B, E])`, called once, before that. One that expands
    no more than one node of a level has an attribute `drafts_chains_only`, which is true. One whose rows can leave a
    batch, share what was read of a prompt or be continued is a `RowCopyingDrafter` besides.

    Attributes:
        feature_layers: indices into transformers' `hidden_states` (0 = embeddings, n = after the final norm) that the
            target hands over, concatenated on the last dimension in this order; () = none.
        max_depth: the deepest tree level the drafter can propose; None = any.
    """

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    @property
    def max_depth(self) -> int | None: ...

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> Any:
        """Returns a fresh state for rows of at most `max_length` tokens and trees of at most `num_scratch` frontier
        nodes (all levels together)."""

    def extend(
        self, state: Any, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        """Takes in slots that are certain, drops what was drafted, and scores the children of the root.

        Args:
            state: what `start` returned; updated in place.
            features: [B, S, F] the target's features of the S positions, or None when `feature_layers` is empty.
            next_token_ids: [B, S] int64, the token one position after each feature; the last one is the root.
            counts: [B] int64; only the first counts[b] slots of row b are real. 0 leaves the row as it was (its scores
                are then unspecified).
            max_slots: the largest number of certain slots of any row after this call (a host integer, so that no
                synchronisation is needed to size the attention).

        Returns:
            [B, 1, C] scores of the root's children.
        """

    def expand(self, state: Any, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        """Scores the children of one level's frontier nodes.

        Args:
            state: as in `extend`; the frontier is added to its scratch rows.
            token_ids: [B, W] int64, the frontier nodes' target token ids.
            parents: [B, W] int64, each node's parent as an index into the PREVIOUS frontier (all 0 at depth 1).
            depth: the frontier's depth; 1 = children of the root.

        Returns:
            [B, W or 1, C] scores of the frontier nodes' children.
        """


@runtime_checkable
class CacheSharingDrafter(Protocol):
    """What a `Drafter` has besides when it runs layers of the target itself and so reads the target's keys and values
    of certain tokens (Kangaroo, arXiv 2404.18911)."""

    def share_cache(self, state: Any, cache: TreeCache) -> None:
        """Called once behind `start`. Whenever `extend` or `expand` is called, `cache` holds the certain tokens, root
        excluded, and has `num_scratch` + 1 slots behind them in every row, for the draft to write to. When prompts are
        handed over in parts, a row that ends within a part may hold its root already; nobody reads what `extend` then
        says of it."""


@runtime_checkable
class RowCopyingDrafter(Protocol):
    """What a `Drafter` has besides when its rows can be carried from state to state: so finished rows leave a batch, a
    prompt's beginning is read once for many rows, and a text is continued."""

    def copy_rows(self, state: Any, source: Any, rows: Tensor, lengths: Tensor, *, max_slots: int) -> None:
        """Fills a fresh state with rows of another one, as if it had been handed their first slots itself.

        What a drafter has learned about a row (`MergedDrafter`'s weights) and a text's first token (`read_first`, which
        is not called again) go with the row, however few slots are kept. Nothing is shared: either state may be
        extended, or copied again, without changing the other. What was drafted is not copied, so the next call is an
        `extend`, whose counts may be 0.

        Args:
            state: for B' rows, what `start` has just returned, with any `max_length` and `num_scratch`. A
                `CacheSharingDrafter` is given its cache, filled with the same rows, before the next `extend`.
            source: any state of this drafter.
            rows: [B'] int64, the row of `source` that becomes each row; a row may be taken more than once, or not at
                all.
            lengths: [B'] int64, how many of its first certain slots are kept: none to all, and no more than fit.
            max_slots: no entry of `lengths` is larger (a host integer: nothing beyond is copied).
        """


# Greedy targets take their most likely token, which is the drafter's more often than its chance in sampling says. This
# much sharper, scores rank the nodes of a dynamic tree better (docs/benchmarks/changes.md).
GREEDY_TEMPERATURE = 0.7


@dataclass(frozen=True)
class DraftSampling:
    """How candidates are picked from draft scores: as the target will pick its own token.

    Attributes:
        warp: the target's prefix-free logits processors, applied to draft logits [R, C] (arXiv 2211.17192, section 2.2:
            every sampling setting is an adjusted distribution, applied to p and q alike); None = greedy decoding.
        noise: [B, depth + 1, V] float32 Gumbel noise: entry d is that of the token drawn at the nodes of depth d;
            None = greedy, or uncoupled drafting.
        draws: how to draw drafts at random, for acceptance rules that compare p and q; None = the best candidates.
    """

    warp: Callable[[Tensor], Tensor] | None = None
    noise: Tensor | None = None
    draws: DraftDraws | None = None

    def score(self, draft: DraftLogits, depth: int) -> Tensor:
        """Log-scores [B, W or 1, C] float32 of the children of nodes at `depth` (root 0): log q, plus the target's own
        Gumbel noise when drafting is coupled (arXiv 2408.07978), or at `GREEDY_TEMPERATURE` when the target is greedy;
        normalised over the columns."""
        logits = draft.logits.float()
        if self.warp is None and self.noise is None:
            logits = logits / GREEDY_TEMPERATURE
        elif self.warp is not None:
            logits = warp_candidates(self.warp, logits)
        if self.noise is not None:
            noise_BV = self.noise[:, depth]
            if draft.token_ids is None:
                noise = noise_BV[:, None, :]
            elif draft.token_ids.dim() == 1:
                noise = noise_BV[:, None, draft.token_ids]
            else:
                noise = torch.gather(noise_BV, 1, draft.token_ids.flatten(1)).view_as(draft.token_ids)
            logits = torch.log_softmax(logits, dim=-1) + noise
        # A node without any candidate normalises to NaN.
        return torch.log_softmax(logits, dim=-1).nan_to_num(nan=float("-inf"), neginf=float("-inf"))


def warp_candidates(warp: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """Draft scores [B, W, C] float32, adjusted. Columns of -inf stay so, and nodes that have no others are kept from
    the processors, some of which fail on them."""
    is_absent = logits.isneginf()
    adjusted = warp(logits.masked_fill(is_absent.all(-1, keepdim=True), 0.0).flatten(0, 1)).view_as(logits)
    return adjusted.masked_fill(is_absent, float("-inf"))
