"""MergedDrafter: the candidates of two drafters in one tree, such as trained heads and n-grams of the text.

Every node's children are scored by the mixture w1 c1 q1 + w2 c2 q2. q is a drafter's distribution over its candidates,
c its confidence at the node (`DraftLogits.confidence`, 1 if it gives none) and w its weight. The decode loop normalises
the sum, so a drafter without candidates at a node leaves the node to the other.

The weights maximise the likelihood of the text, by online expectation maximisation: when both drafters had candidates
for the children of the last root, and the next token is x, drafter i gets the credit
r_i = w_i c_i q_i(x) / sum_j w_j c_j q_j(x), and w_i moves to (1 - rate) w_i + rate r_i (Cappe and Moulines, "Online
EM algorithm for latent data models", arXiv 0712.4273, for this one parameter). Each row of a batch has its own weights.

Legend: B batch, S slots of one call, W frontier nodes, F feature width, C, D candidate columns of the two drafters,
V target vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.inference.cache.kv_cache import KVCache, pick_rows
from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.row_state import first_rows
from draftsmith.inference.targets.target import Target

# No weight falls to zero: a text may begin to repeat itself at any time.
MIN_WEIGHT = 0.02


@dataclass
class MergedState:
    """The state of one batch.

    Attributes:
        states: the two drafters'.
        weights: [B, 2] float32; None before the first `extend`.
        roots: each drafter's scores of the last root's children, -inf for a row that has none; None before the first
            `extend`.
    """

    states: tuple[Any, Any]
    weights: Tensor | None = None
    roots: tuple[DraftLogits, DraftLogits] | None = None


class MergedDrafter(Drafter, nn.Module):
    """Drafts with two drafters at once. A third is added by merging twice.

    Every level costs as much as both drafters, so this is worth it if one of them is nearly free.

    Args:
        first, second: any drafters.
        weight: of the second in the mixture, from 0 to 1, at the beginning of each text.
        rate: the share of the newest step in the weights; 0 = fixed weights.

    Attributes:
        feature_layers: of both, the first's in front.
        max_depth: the smaller of both.

    Raises:
        ValueError: for a bad weight or rate, or for two drafters that both write to the target's cache.
    """

    def __init__(self, first: Drafter, second: Drafter, *, weight: float = 0.5, rate: float = 0.05) -> None:
        super().__init__()
        if not 0 < weight < 1 or not 0 <= rate < 1:
            raise ValueError(
                f"got weight={weight} and rate={rate}; allowed are weights between 0 and 1 and rates from 0 to below 1"
            )
        self._hold(first, second)
        self.weight = weight
        self.rate = rate
        self.feature_layers = tuple(dict.fromkeys((*first.feature_layers, *second.feature_layers)))
        if first.shares_target_cache and second.shares_target_cache:
            raise ValueError(
                f"got {type(first).__name__} and {type(second).__name__}, which both draft in the target's own cache "
                "and would overwrite each other: merge one of them with a drafter that has its own"
            )
        self.shares_target_cache = first.shares_target_cache or second.shares_target_cache
        self.can_copy_rows = first.can_copy_rows and second.can_copy_rows
        self.has_static_state = first.has_static_state and second.has_static_state
        self.reads_first_token = first.reads_first_token or second.reads_first_token
        depths = [drafter.max_depth for drafter in self.drafters if drafter.max_depth is not None]
        self.max_depth = min(depths, default=None)
        self.drafts_chains_only = any(drafter.drafts_chains_only for drafter in self.drafters)

    def _hold(self, first: Drafter, second: Drafter) -> None:
        self.drafters = (first, second)
        self.modules_of_drafters = nn.ModuleList(part for part in self.drafters if isinstance(part, nn.Module))

    def for_target(self, target: Target) -> MergedDrafter:
        first, second = (drafter.for_target(target) for drafter in self.drafters)
        if (first, second) == self.drafters:
            return self
        view = copy.copy(self)
        view._modules = dict(self._modules)
        view._hold(first, second)
        return view

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> MergedState:
        first, second = (drafter.start(batch_size, max_length, num_scratch) for drafter in self.drafters)
        return MergedState((first, second))

    def share_cache(self, state: MergedState, cache: KVCache) -> None:
        for drafter, own in zip(self.drafters, state.states, strict=True):
            if drafter.shares_target_cache:
                drafter.share_cache(own, cache)

    def copy_rows(
        self, state: MergedState, source: MergedState, rows: Tensor, lengths: Tensor, *, max_slots: int
    ) -> None:
        """Rows keep their weights. Their next token changes no weight, because the scores of their last root's children
        are not copied."""
        for drafter, own, other in zip(self.drafters, state.states, source.states, strict=True):
            drafter.copy_rows(own, other, rows, lengths, max_slots=max_slots)
        if source.weights is not None:
            state.weights = source.weights.index_select(0, rows.to(source.weights.device))

    def keep_rows(self, state: MergedState, rows: Sequence[int]) -> None:
        for drafter, own in zip(self.drafters, state.states, strict=True):
            drafter.keep_rows(own, rows)
        if state.weights is not None:
            state.weights = first_rows(state.weights, rows)
        if state.roots is not None:
            first, second = (_map_rows(lambda values: pick_rows(values, rows), root) for root in state.roots)
            state.roots = (first, second)

    def add_rows(self, state: MergedState, other: MergedState, *, max_slots: int) -> None:
        """Added rows keep their weights. Their next token changes no weight, as after `copy_rows`."""
        assert state.weights is not None, "a state whose rows have read nothing has no use for more"
        for drafter, own, added in zip(self.drafters, state.states, other.states, strict=True):
            drafter.add_rows(own, added, max_slots=max_slots)
        weights = self._first_weights(state.weights[:1]) if other.weights is None else other.weights
        state.weights = torch.cat([state.weights, weights])
        if state.roots is not None:
            first, second = (_add_silent_rows(root, len(weights)) for root in state.roots)
            state.roots = (first, second)

    def read_source(self, state: MergedState, token_ids: Tensor, mask: Tensor) -> None:
        for drafter, own in zip(self.drafters, state.states, strict=True):
            drafter.read_source(own, token_ids, mask)

    def read_first(self, state: MergedState, token_ids: Tensor) -> None:
        for drafter, own in zip(self.drafters, state.states, strict=True):
            drafter.read_first(own, token_ids)

    def extend(
        self, state: MergedState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        """`Drafter.extend` of both, after each got its credit for the token that followed the last root."""
        if state.weights is None:
            state.weights = self._first_weights(next_token_ids)
        if state.roots is not None and self.rate > 0:
            state.weights.copy_(self._credit(state.weights, state.roots, next_token_ids[:, 0], counts > 0))
        first, second = (
            drafter.extend(own, self._features_of(drafter, features), next_token_ids, counts, max_slots=max_slots)
            for drafter, own in zip(self.drafters, state.states, strict=True)
        )
        if state.roots is None:
            state.roots = _silence(first), _silence(second)
        for root, new in zip(state.roots, (first, second), strict=True):
            _write_rows(root, new, counts > 0)
        return self._merge(state, first, second)

    def expand(self, state: MergedState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        first, second = (
            drafter.expand(own, token_ids, parents, depth)
            for drafter, own in zip(self.drafters, state.states, strict=True)
        )
        return self._merge(state, first, second)

    def _first_weights(self, rows: Tensor) -> Tensor:
        """[B, 2] the weights at the beginning of texts, for as many rows as `rows` [B, ...] has, on its device."""
        of_second = torch.full_like(rows[:, 0], self.weight, dtype=torch.float32)
        return torch.stack([1 - of_second, of_second], dim=1)

    def _features_of(self, drafter: Drafter, features: Tensor | None) -> Tensor | None:
        """[B, S, its F] of the layers one drafter asked for."""
        if features is None or not drafter.feature_layers:
            return None
        if tuple(drafter.feature_layers) == self.feature_layers:
            return features
        layers = dict(zip(self.feature_layers, features.chunk(len(self.feature_layers), dim=-1), strict=True))
        return torch.cat([layers[layer] for layer in drafter.feature_layers], dim=-1)

    def _credit(
        self, weights: Tensor, roots: tuple[DraftLogits, DraftLogits], token_ids: Tensor, is_new: Tensor
    ) -> Tensor:
        """The weights after the tokens [B] that followed the last roots, in the rows where they are new [B]."""
        chances = torch.stack([chance_of(root, token_ids) for root in roots], dim=1)  # [B, 2]
        had_candidates = torch.stack([(root.logits > -torch.inf).any(-1)[:, 0] for root in roots], dim=1).all(1)
        shares = weights * chances
        total = shares.sum(1)
        moved = (1 - self.rate) * weights + self.rate * shares / total.clamp(min=1e-30)[:, None]
        moved = moved.clamp(MIN_WEIGHT, 1 - MIN_WEIGHT)
        is_credited = had_candidates & is_new & (total > 0)
        return torch.where(is_credited[:, None], moved, weights)

    def _merge(self, state: MergedState, first: DraftLogits, second: DraftLogits) -> DraftLogits:
        assert state.weights is not None
        weights = state.weights[:, :, None, None]  # [B, 2, 1, 1]
        return merge_drafts(first, to_chances(first) * weights[:, 0], second, to_chances(second) * weights[:, 1])


def _map_rows(function: Callable[..., Tensor], *drafts: DraftLogits) -> DraftLogits:
    """The draft whose tensors [B, ...] are `function` of those of `drafts`, which have one form."""
    token_ids, confidence = drafts[0].token_ids, drafts[0].confidence
    if token_ids is not None and token_ids.dim() == 3:
        token_ids = function(*(draft.token_ids for draft in drafts))
    if confidence is not None:
        confidence = function(*(draft.confidence for draft in drafts))
    return DraftLogits(function(*(draft.logits for draft in drafts)), token_ids, confidence)


def _write_rows(old: DraftLogits, new: DraftLogits, is_new: Tensor) -> None:
    """Writes one draft over another of its form, in the rows where `is_new` [B]."""
    pairs = [(old.logits, new.logits), (old.token_ids, new.token_ids), (old.confidence, new.confidence)]
    for values, others in pairs:
        if values is not None and others is not None and values.shape[0] == len(is_new) and values.dim() > 1:
            values.copy_(torch.where(is_new.view(-1, *[1] * (values.dim() - 1)), others, values))


def _add_silent_rows(draft: DraftLogits, count: int) -> DraftLogits:
    """The draft with `count` more rows, which have no candidates."""
    added = _map_rows(lambda values: torch.cat([values[:1]] * count), draft)
    return _map_rows(lambda *parts: torch.cat(parts), draft, _silence(added))


def _silence(draft: DraftLogits) -> DraftLogits:
    """The draft without candidates, in memory of its own."""
    return replace(_map_rows(torch.clone, draft), logits=torch.full_like(draft.logits, -torch.inf))


def to_chances(draft: DraftLogits) -> Tensor:
    """[B, W, C] float32: each column's chance c q; all 0 at a node without candidates."""
    chances = torch.softmax(draft.logits.float(), dim=-1).nan_to_num(nan=0.0)
    return chances if draft.confidence is None else chances * draft.confidence[..., None]


def chance_of(draft: DraftLogits, token_ids: Tensor) -> Tensor:
    """[B] float32: the chance that a draft of one node gave to each of the tokens [B]."""
    chances = to_chances(draft)[:, 0]  # [B, C]
    if draft.token_ids is None:
        is_known = token_ids < chances.shape[-1]
        return chances.gather(1, torch.where(is_known, token_ids, 0)[:, None])[:, 0] * is_known
    columns = draft.token_ids if draft.token_ids.dim() == 1 else draft.token_ids[:, 0]
    return (chances * (columns == token_ids[:, None])).sum(-1)


def merge_drafts(first: DraftLogits, first_chances: Tensor, second: DraftLogits, second_chances: Tensor) -> DraftLogits:
    """The sum of two drafts' chances; a token that both have is one column.

    The columns of the draft that has the same tokens at all nodes (the whole or a reduced vocabulary) come first, then
    those of the other. Columns of the other that are empty or merged have the score -inf.

    Worked example, tokens with their chances:

        first            a 0.3   b 0.2
        second           b 0.4   c 0.1
        merged           a 0.3   b 0.6   b 0 (merged)   c 0.1

    Args:
        first_chances, second_chances: [B, W or 1, C or D] float32, weighted.

    Returns:
        logarithms of the sums, [B, W, C] when one draft is over all tokens, else [B, W, C + D].
    """
    if _width_of(first) < _width_of(second):
        return merge_drafts(second, second_chances, first, first_chances)
    batch, width = first_chances.shape[0], max(first_chances.shape[1], second_chances.shape[1])
    base, added = first_chances.expand(batch, width, -1), second_chances.expand(batch, width, -1)
    if first.token_ids is None and second.token_ids is None:
        return DraftLogits((base + added).log())
    assert second.token_ids is not None
    if first.token_ids is None:
        return DraftLogits(base.scatter_add(-1, second.token_ids.expand(added.shape), added).log())
    found = find_columns(first.token_ids, base, second.token_ids)
    column, is_known = (x.expand(added.shape) for x in found)
    base = base.scatter_add(-1, column, torch.where(is_known, added, 0.0))
    merged = torch.cat([base, torch.where(is_known, 0.0, added)], dim=-1).log()
    if second.token_ids.dim() == 1:
        return DraftLogits(merged, torch.cat([first.token_ids, second.token_ids]))
    return DraftLogits(merged, torch.cat([x.expand(batch, width, -1) for x in (first.token_ids, second.token_ids)], -1))


def _width_of(draft: DraftLogits) -> int:
    """2 if the columns are the whole vocabulary, 1 for a reduced one, 0 for tokens of each node."""
    return 2 if draft.token_ids is None else int(draft.token_ids.dim() == 1)


def find_columns(token_ids: Tensor, chances: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The column of each token of `wanted` ([D] or [B, W or 1, D]) among `token_ids` ([C] or [B, W or 1, C]), whose
    chances are [B, W, C].

    Returns:
        the columns, int64 (0 for a token without one), and whether there is one; of the shape of `wanted` or [B, W, D].
    """
    if token_ids.dim() == 1:  # a reduced vocabulary has each token once
        keys = token_ids
    else:  # columns without a chance may hold any token
        keys = torch.where(chances > 0, token_ids, -1)
        wanted = wanted.expand(*keys.shape[:2], -1).contiguous()
    ordered, order = keys.sort(dim=-1, stable=True)
    place = torch.searchsorted(ordered, wanted).clamp(max=keys.shape[-1] - 1)
    if token_ids.dim() == 1:
        column, is_known = order[place], ordered[place] == wanted
    else:
        column, is_known = order.gather(-1, place), ordered.gather(-1, place) == wanted
    return torch.where(is_known, column, 0), is_known
