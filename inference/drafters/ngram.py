"""NgramDrafter: prompt look-up. It drafts the tokens that followed the last n-gram earlier in the text.

It needs no training and runs no model, so it is the baseline for text that repeats itself. The idea is prompt look-up
decoding (A. Saxena, 2023), here for trees: every node of the tree looks up its own suffix. Each level reads the whole
text once per candidate and suffix length, so the cost grows with the text; it is small beside a model's.

The scores are those of "stupid backoff" (Brants et al., "Large Language Models in Machine Translation", EMNLP 2007,
section 4) over the text so far, with later occurrences weighted more.

Legend: B batch, S slots of one call, W frontier nodes, C candidate columns, E positions of the history in view.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.row_state import RowState
from draftsmith.inference.targets.target import Target

BACKOFF = 0.4  # for each token that a match is shorter (the paper's)
RECENCY = 1.0  # an occurrence at the end weighs 1 + RECENCY, one at the beginning 1


@dataclass
class NgramState(RowState):
    """The texts so far.

    Attributes:
        history: [B, capacity + 1] int64; padding is written to the last column.
        lengths: [B] int64.
        view: the host's bound of `lengths`.
        paths: [B, W, depth] int64, the drafted tokens down to each node of the last frontier.
    """

    history: Tensor
    lengths: Tensor
    view: int
    paths: Tensor
    row_fields = ("lengths",)
    slot_fields = ("history",)

    def copy_rows(self, source: NgramState, rows: Tensor, lengths: Tensor, max_slots: int) -> None:
        super().copy_rows(source, rows, lengths, max_slots)
        self.lengths.copy_(lengths)


class NgramDrafter(Drafter):
    """Drafts the continuations of earlier occurrences of the last tokens.

    Every node looks up the longest suffix of its text and drafted path, of at most `max_ngram` tokens, that occurs
    earlier in the text. The latest occurrences come first, then those of shorter suffixes. Each token is a candidate
    only once; columns that stay empty have the score -inf.

    A token's score is log(share * BACKOFF^k): its share of the continuations of the longest suffix it follows, which is
    k tokens shorter than the node's longest suffix.

    Worked example with `max_ngram=2, num_candidates=3`; position e of 11 has the weight (11 + e) / 11:

        text          a b c   a b d   x b e   a b
        suffix "a b"  followed by d (latest, at 5), then c (at 2)
        suffix "b"    followed by e (at 8), d and c again
        columns       d             c             e
        scores        log(16/29)    log(13/29)    log(0.4 * 19/48)
    """

    can_copy_rows = True
    has_static_state = True

    def __init__(self, *, max_ngram: int = 3, num_candidates: int = 4) -> None:
        """
        Args:
            max_ngram: the longest suffix to look up, in tokens.
            num_candidates: C, continuations per node.
        """
        if max_ngram < 1 or num_candidates < 1:
            raise ValueError(f"max_ngram and num_candidates start at 1, got {max_ngram=} and {num_candidates=}")
        self.max_ngram = max_ngram
        self.num_candidates = num_candidates
        self.device = torch.device("cpu")

    def for_target(self, target: Target) -> NgramDrafter:
        own = copy.copy(self)
        own.device = target.device
        return own

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> NgramState:
        history = torch.zeros((batch_size, max_length + 1), dtype=torch.long, device=self.device)
        return NgramState(history, history.new_zeros(batch_size), 0, history.new_zeros((batch_size, 1, 0)))

    def extend(
        self, state: NgramState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        batch, num_slots = next_token_ids.shape
        steps = torch.arange(num_slots, device=next_token_ids.device)
        dump = state.history.shape[1] - 1
        slots = torch.where(steps < counts[:, None], state.lengths[:, None] + steps, dump)
        state.history.scatter_(1, slots, next_token_ids)
        state.lengths += counts
        state.view = max_slots
        state.paths = next_token_ids.new_zeros((batch, 1, 0))
        return self._look_up(state)

    def expand(self, state: NgramState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        index = parents[..., None].expand(*parents.shape, state.paths.shape[2])
        state.paths = torch.cat([state.paths.gather(1, index), token_ids[..., None]], dim=2)
        return self._look_up(state)

    def _look_up(self, state: NgramState) -> DraftLogits:
        """The children [B, W, C] of the frontier whose paths are in `state`."""
        history = state.history[:, : state.view]  # [B, E]
        suffix, is_token = self._read_suffixes(state)  # [B, W, max_ngram], latest token first
        ends = torch.arange(state.view, device=history.device)  # each position holds a possible continuation
        weights = (1.0 + RECENCY * ends / state.lengths.clamp(min=1)[:, None])[:, None]  # [B, 1, E] of occurrences
        matched = torch.zeros((*suffix.shape[:2], state.view), dtype=torch.long, device=history.device)
        still = (ends < state.lengths[:, None])[:, None, :].expand_as(matched)
        totals = []  # of each suffix length, the weight of all its occurrences
        for back in range(self.max_ngram):
            earlier = history.roll(back + 1, dims=1)  # earlier[e] = history[e - back - 1]
            fits = (earlier[:, None, :] == suffix[..., back, None]) & is_token[..., back, None] & (ends > back)
            still = still & fits
            matched += still
            totals.append((still * weights).sum(-1, keepdim=True))
        rank = torch.where(matched > 0, matched * state.view + ends, -1)  # longest match first, then the latest
        tokens, lengths, own = [], [], []
        for _ in range(self.num_candidates):
            best, place = rank.max(-1, keepdim=True)  # [B, W, 1]
            token = history[:, None, :].expand_as(rank).gather(2, place)
            is_own = history[:, None, :] == token
            length = torch.where(best >= 0, matched.gather(2, place), 0)
            tokens.append(torch.where(best >= 0, token, 0))
            lengths.append(length)
            # A token is found by the longest suffix it follows.
            own.append((is_own & (matched == length)).mul(weights).sum(-1, keepdim=True))
            rank = rank.masked_fill(is_own, -1)
        token, length = torch.cat(tokens, dim=2), torch.cat(lengths, dim=2)  # [B, W, C]
        total = torch.cat(totals, dim=2).gather(2, (length - 1).clamp(min=0))
        share = torch.cat(own, dim=2) / total
        longest = length[..., :1]
        logits = torch.where(length > 0, share.log() + math.log(BACKOFF) * (longest - length), -torch.inf)
        return DraftLogits(logits, token)

    def _read_suffixes(self, state: NgramState) -> tuple[Tensor, Tensor]:
        """The last `max_ngram` tokens of every frontier node's text and path, latest first, and whether they exist."""
        batch, num_nodes, depth = state.paths.shape
        num_text = max(self.max_ngram - depth, 0)
        places = state.lengths[:, None] - 1 - torch.arange(num_text, device=state.lengths.device)  # [B, num_text]
        text = state.history.gather(1, places.clamp(min=0))
        path = state.paths.flip(2)[..., : self.max_ngram]
        suffix = torch.cat([path, text[:, None].expand(batch, num_nodes, num_text)], dim=2)
        exists = torch.cat(
            [torch.ones_like(path, dtype=torch.bool), (places >= 0)[:, None].expand(batch, num_nodes, num_text)], dim=2
        )
        return suffix, exists
