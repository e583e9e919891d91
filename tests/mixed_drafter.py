"""A drafter of two: each node's scores are the mean of both distributions, over the whole vocabulary.

With a `ScriptedDrafter` as the first, heads draft beside true tokens, so that deep paths of their trees are accepted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.inference import Drafter, DraftLogits, Target
from draftsmith.inference.cache.kv_cache import KVCache

States = list[Any]


class MixedDrafter(Drafter, nn.Module):
    """A state is the list of both states."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        super().__init__()
        self.both = (first, second)
        self.feature_layers = tuple(dict.fromkeys((*first.feature_layers, *second.feature_layers)))
        for name in ("shares_target_cache", "reads_first_token", "drafts_chains_only"):
            setattr(self, name, any(getattr(one, name) for one in self.both))
        for name in ("can_copy_rows", "has_static_state"):
            setattr(self, name, all(getattr(one, name) for one in self.both))
        self.max_depth = min((one.max_depth for one in self.both if one.max_depth is not None), default=None)

    def for_target(self, target: Target) -> MixedDrafter:
        view = copy.copy(self)
        view.both = tuple(one.for_target(target) for one in self.both)
        view.vocab_size = target.vocab_size
        return view

    def start(self, *sizes: int) -> States:
        return [one.start(*sizes) for one in self.both]

    def share_cache(self, state: States, cache: KVCache) -> None:
        for one, own in zip(self.both, state, strict=True):
            if one.shares_target_cache:
                one.share_cache(own, cache)

    def read_first(self, state: States, token_ids: Tensor) -> None:
        for one, own in zip(self.both, state, strict=True):
            one.read_first(own, token_ids)

    def copy_rows(self, state: States, source: States, *rows: Any, **options: Any) -> None:
        for one, own, other in zip(self.both, state, source, strict=True):
            one.copy_rows(own, other, *rows, **options)

    def keep_rows(self, state: States, rows: Sequence[int]) -> None:
        for one, own in zip(self.both, state, strict=True):
            one.keep_rows(own, rows)

    def extend(self, state: States, features: Tensor | None, *tokens: Tensor, **options: Any) -> DraftLogits:
        drafts = []
        for one, own in zip(self.both, state, strict=True):
            drafts.append(one.extend(own, self._features_of(one, features), *tokens, **options))
        return self._mix(drafts)

    def expand(self, state: States, *frontier: Any) -> DraftLogits:
        return self._mix([one.expand(own, *frontier) for one, own in zip(self.both, state, strict=True)])

    def _features_of(self, drafter: Drafter, features: Tensor | None) -> Tensor | None:
        if features is None or not drafter.feature_layers:
            return None
        layers = dict(zip(self.feature_layers, features.chunk(len(self.feature_layers), dim=-1), strict=True))
        return torch.cat([layers[layer] for layer in drafter.feature_layers], dim=-1)

    def _mix(self, drafts: list[DraftLogits]) -> DraftLogits:
        first, second = (self._to_chances(draft) for draft in drafts)
        return DraftLogits((first + second).log())

    def _to_chances(self, draft: DraftLogits) -> Tensor:
        """[B, W or 1, V]; all 0 at a node without candidates."""
        chances = torch.softmax(draft.logits.float(), dim=-1).nan_to_num(nan=0.0)
        if draft.token_ids is None:
            return nn.functional.pad(chances, (0, self.vocab_size - chances.shape[-1]))
        whole = chances.new_zeros((*chances.shape[:2], self.vocab_size))
        return whole.scatter_add(-1, draft.token_ids.expand(chances.shape), chances)
