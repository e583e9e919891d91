"""One step of the decode loop as functions of tensors: draft a tree, verify it, accept a path, commit it.

With `compile`, each becomes one graph of torch.compile with static shapes. The host integers a graph depends on are few
on purpose (how many cache slots are in view); whatever changes at every step stays outside or in a tensor.

Legend: B batch, S slots handed to the drafter, N tree nodes, P path length (tree depth + 1), F feature width, V target
vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from inference.acceptance import Acceptance, Sampler, accept_exact
from inference.drafter import Drafter, DraftSampling
from inference.kv_cache import TreeCache
from inference.policy import TreePolicy
from inference.stats import GenerationStats
from inference.target import Target, TargetOutput
from inference.tree import TokenTree

# Slots in view, and the cache's capacity, grow in steps of so many: each number of slots is a graph of its own.
COMPILED_VIEW_MULTIPLE = 256
COMPILED_CAPACITY_MULTIPLE = 1024
CAPACITY_MULTIPLE = 256
# Graphs torch keeps of one function before it gives up on it: views x decoders in one process.
RECOMPILE_LIMIT = 128

Function = TypeVar("Function", bound=Callable[..., Any])


class DecodeStep:
    """The parts of a step, eager or compiled.

    Args:
        drafter, policy: None for plain decoding.
        is_coupled: drafts read the target's own noise (see `Decoder`).
        compile: compile what can be; processors that read the prefix run eagerly, as do prompts.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: TreePolicy | None,
        *,
        is_coupled: bool,
        compile: bool,  # noqa: A002
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self.is_coupled = is_coupled
        self.feature_layers = drafter.feature_layers if drafter is not None else ()
        self.is_compiled = compile
        self.stats = GenerationStats()  # of the present call
        if compile:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        self._draft = self._compile(self._draft_eagerly)
        self._verify = self._compile(self._verify_eagerly)
        self._accept = self._compile(accept_exact)
        self._commit = self._compile(self._commit_eagerly)

    @property
    def num_nodes(self) -> int:
        return self.policy.num_nodes if self.policy is not None else 1

    @property
    def num_depths(self) -> int:
        """Tokens one step can emit: `path_width` of its trees."""
        return 1 + min(self.policy.max_depth, self.num_nodes - 1) if self.policy is not None else 1

    @property
    def capacity_multiple(self) -> int:
        return COMPILED_CAPACITY_MULTIPLE if self.is_compiled else CAPACITY_MULTIPLE

    def new_cache(self, batch_size: int, capacity: int) -> TreeCache:
        cache = self.target.new_cache(batch_size, capacity)
        if self.is_compiled:
            cache.view_multiple = COMPILED_VIEW_MULTIPLE
        return cache

    def draft(
        self,
        state: Any,
        cache: TreeCache,
        sampler: Sampler,
        features: Tensor | None,
        next_ids: Tensor,
        counts: Tensor,
        *,
        max_slots: int,
    ) -> tuple[TokenTree, Tensor | None]:
        """Hands the newly certain slots to the drafter and grows the tree.

        Args:
            features: [B, S, F]; next_ids: [B, S] the token one position after each; counts: [B] real slots per row.
            max_slots: the largest number of certain slots of any row afterwards.

        Returns:
            the tree, and the step's noise [B, P, V] (None when greedy).
        """
        is_prompt = next_ids.shape[1] != self.num_depths  # of another length each time
        call = self._draft_eagerly if is_prompt else self._draft
        if self.is_compiled:
            max_slots = cache.view_for(max_slots)
        return call(state, cache.lengths, sampler, features, next_ids, counts, max_slots)

    def _draft_eagerly(
        self,
        state: Any,
        lengths: Tensor,
        sampler: Sampler,
        features: Tensor | None,
        next_ids: Tensor,
        counts: Tensor,
        max_slots: int,
    ) -> tuple[TokenTree, Tensor | None]:
        root_ids = next_ids.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        num_levels = self.policy.max_depth + 1 if self.policy is not None else 1
        noise = sampler.draw_noise(lengths, num_levels, self.target.vocab_size)
        if self.drafter is None or self.policy is None:
            return TokenTree.from_root(root_ids), noise
        draft = self.drafter.extend(state, features, next_ids, counts, max_slots=max_slots)
        sampling = DraftSampling(
            warp=sampler.warp_draft if sampler.do_sample else None, noise=noise if self.is_coupled else None
        )
        return self.policy.grow(self.drafter, state, root_ids, draft, sampling), noise

    def verify(self, cache: TreeCache, tree: TokenTree) -> TargetOutput:
        """Logits [B, N, V] and features [B, N, F] of the tree's nodes."""
        cache.open_slots(tree.num_nodes)
        return self._verify(cache, tree)

    def _verify_eagerly(self, cache: TreeCache, tree: TokenTree) -> TargetOutput:
        return self.target.verify_opened(cache, tree, feature_layers=self.feature_layers)

    def accept(
        self, sampler: Sampler, tree: TokenTree, logits: Tensor, root_positions: Tensor, **kwargs: Any
    ) -> Acceptance:
        """`accept_exact`."""
        call = self._accept if sampler.is_prefix_free else accept_exact
        return call(sampler, tree, logits, root_positions, **kwargs)

    def commit(self, cache: TreeCache, accepted: Acceptance, counts: Tensor, features: Tensor | None) -> Tensor | None:
        """Keeps the accepted nodes in the cache and returns their features [B, P, F]."""
        kept = self._commit(cache, accepted.path, counts, features)
        cache.raise_bound(accepted.path.shape[1])
        return kept

    def _commit_eagerly(self, cache: TreeCache, path: Tensor, counts: Tensor, features: Tensor | None) -> Tensor | None:
        cache.keep(path, counts, is_chain=self.policy is None or self.policy.is_chain)
        if features is None:
            return None
        return features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))

    def _compile(self, function: Function) -> Function:
        """The function, compiled; the time it spends compiling is booked as such."""
        if not self.is_compiled:
            return function
        compiled = torch.compile(function, dynamic=False)

        def call(*args: Any, **kwargs: Any) -> Any:
            graphs, start = _num_graphs(), time.perf_counter()
            result = compiled(*args, **kwargs)
            if _num_graphs() > graphs:
                self.stats.seconds["compile"] += time.perf_counter() - start
            return result

        return call  # type: ignore[return-value]


def _num_graphs() -> int:
    """Graphs torch.compile has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
