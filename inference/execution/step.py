"""DecodeStep: the parts of one step of the decode loop, each of them a function of tensors that an executor runs.

Legend: B batch, S slots handed to the drafter, N tree nodes, P path length (tree depth + 1), F feature width, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.acceptance.exact import accept_exact
from draftsmith.inference.acceptance.rejection import DRAFT_STREAM
from draftsmith.inference.acceptance.rules import EXACT, AcceptanceRule
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.acceptance.walk import Acceptance
from draftsmith.inference.cache.source import Source
from draftsmith.inference.cache.tree_cache import VIEW_MULTIPLE, TreeCache
from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.sampling import DraftSampling
from draftsmith.inference.drafters.slots import NewSlots
from draftsmith.inference.execution.executor import Executor
from draftsmith.inference.noise import derive_seeds
from draftsmith.inference.targets.multimodal import Media, read_media
from draftsmith.inference.targets.passes import TargetOutput
from draftsmith.inference.targets.target import Target
from draftsmith.inference.trees.policy import TreePolicy, run_eagerly
from draftsmith.inference.trees.token_tree import TokenTree

# Capacities of caches are rounded up: to powers of two with graphs, since each is a graph of its own.
CAPACITY_MULTIPLE = 256
GRAPH_CAPACITY = 1024
# Tokens of a row per compiled pass over prompts. From 128 on attention would be another graph.
COMPILED_CHUNK = 120
# Longer prompts are read eagerly: most of their time is products, which are as fast.
COMPILED_PROMPT = 256


class DecodeStep:
    """The parts of a step.

    Args:
        drafter, policy: None for plain decoding.
        is_coupled: drafts read the target's own noise (see `Decoder`), if the rule allows it.
        rule: which drafted tokens are kept.
        executor: runs the parts. Slots that waited, lazy processors, and most prompts run eagerly.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: TreePolicy | None,
        *,
        is_coupled: bool = True,
        rule: AcceptanceRule = EXACT,
        executor: Executor | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self.is_coupled = is_coupled and rule.may_couple
        self.rule = rule
        self.executor = executor or Executor()
        self.feature_layers = drafter.feature_layers if drafter is not None else ()
        self.has_choice = policy is not None and policy.is_chosen

    @property
    def num_nodes(self) -> int:
        return self.policy.num_nodes if self.policy is not None else 1

    @property
    def num_depths(self) -> int:
        """Tokens that one step can emit, at most."""
        return 1 + min(self.policy.max_depth, self.num_nodes - 1) if self.policy is not None else 1

    @property
    def least_slots(self) -> int:
        """The fewest slots that a drafter reads at once: steps with graphs have one shape."""
        return self.num_depths if self.executor.has_graphs else 1

    @property
    def num_slots_after(self) -> int:
        """Cache slots that a step may write to after a row's committed tokens."""
        num_nodes = max(self.num_nodes, self.target.least_rows)
        if self.policy is None or self.drafter is None or not self.drafter.shares_target_cache:
            return num_nodes
        # Drafting may begin on rows that have just emitted more than their text's length.
        return max(num_nodes, self.num_depths + 1 + self.policy.num_scratch)

    def compiled_chunk(self, longest: int) -> int | None:
        """Tokens of a row per compiled pass over prompts of up to `longest` tokens; None = they are read eagerly."""
        return COMPILED_CHUNK if self._compiles_prompts and longest <= COMPILED_PROMPT else None

    @property
    def _compiles_prompts(self) -> bool:
        """Plain decoding has no graph for it, and where scores must not depend on the drafter, it reads as plain."""
        return self.executor.reads_prompts and self.policy is not None and self.target.least_rows == 1

    @property
    def rows_may_leave(self) -> bool:
        """Whether finished rows leave the batch. Steps with graphs have one shape, and each smaller batch would
        make graphs again."""
        return not self.executor.has_graphs and (self.drafter is None or self.drafter.can_copy_rows)

    def new_cache(self, batch_size: int, capacity: int) -> TreeCache:
        """A cache of at least `capacity` slots per row."""
        cache = self.target.new_cache(batch_size, self.round_capacity(capacity))
        cache.view_multiple = self.executor.view_multiple
        return cache

    def round_capacity(self, capacity: int) -> int:
        """A size of buffers with an entry per token, at least `capacity`."""
        if self.executor.has_graphs:
            # Never all in view: a view of everything is contiguous, which would make one more graph.
            return max(GRAPH_CAPACITY, 1 << (capacity - 1).bit_length()) + VIEW_MULTIPLE
        return -(-capacity // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE

    def start_drafter(self, cache: TreeCache) -> Any:
        """The drafter's state for texts in this cache."""
        assert self.drafter is not None
        assert self.policy is not None
        state = self.drafter.start(cache.batch_size, cache.capacity, self.policy.num_scratch)
        if self.drafter.shares_target_cache:
            self.drafter.share_cache(state, cache)
        return state

    def copy_state(self, cache: TreeCache, source: Any, rows: Sequence[int], num_slots: Sequence[int]) -> Any:
        """A state of the drafter for `cache`, whose row i holds the first num_slots[i] slots of row rows[i] of the
        state `source`; None without a drafter."""
        if self.drafter is None:
            return None
        state = self.start_drafter(cache)
        index = torch.tensor(rows, device=cache.lengths.device)
        slots = torch.tensor(num_slots, device=cache.lengths.device)
        self.drafter.copy_rows(state, source, index, slots, max_slots=max(num_slots))
        return state

    def keep_rows(self, cache: TreeCache, state: Any, rows: Sequence[int]) -> None:
        """Keeps these rows of the drafter's state, in place; `cache` holds only them by now."""
        if self.drafter is None:
            return
        self.drafter.keep_rows(state, rows)
        if self.drafter.shares_target_cache:
            self.drafter.share_cache(state, cache)

    def add_rows(self, cache: TreeCache, state: Any, other: Any, *, max_slots: int) -> None:
        """Adds the rows of the drafter's state `other` to its state `state`, in place; `cache` holds them already."""
        if self.drafter is None:
            return
        self.drafter.add_rows(state, other, max_slots=max_slots)
        if self.drafter.shares_target_cache:
            self.drafter.share_cache(state, cache)

    def read_source(self, state: Any, cache: TreeCache, source: Source) -> None:
        """Gives an encoder-decoder target, and its drafter, the sources of the texts in this cache."""
        self.target.read_source(cache, source)
        if self.drafter is not None:
            self.drafter.read_source(state, source.token_ids, source.mask)

    def read_media(self, cache: TreeCache, media: Media) -> TargetOutput:
        """Reads prompts with media, always eagerly (see `read_media` of targets)."""
        return read_media(self.target, cache, media, feature_layers=self.feature_layers)

    def read_chunk(self, cache: TreeCache, token_ids: Tensor, counts: Tensor) -> TargetOutput:
        """Reads a chunk of prompts and commits it; tensors as in `Target.prefill`."""
        length = token_ids.shape[1]
        view = cache.view_slots(cache.length_bound + length).shape[0]
        # These would be graphs of their own: torch takes a size of 1 for fixed, and may take two equal sizes for one;
        # the beginning that a batch shares is read by one row.
        is_other = not 1 < length <= COMPILED_CHUNK or length == view or cache.batch_size < cache.max_batch_size
        if not self._compiles_prompts or is_other:
            return self.target.prefill(cache, token_ids, counts, feature_layers=self.feature_layers, chunk_size=length)
        output = self.verify(cache, TokenTree.from_prompts(token_ids, counts))
        cache.advance(counts, length)
        rows = torch.arange(len(counts), device=counts.device)
        return TargetOutput(output.logits[rows, (counts - 1).clamp(min=0)][:, None], output.features)

    def draft(
        self, state: Any, cache: TreeCache, sampler: Sampler, slots: NewSlots, policy: TreePolicy
    ) -> tuple[TokenTree, Tensor | None]:
        """Hands the newly certain slots to the drafter and grows the tree.

        Returns:
            the tree, and the step's noise [B, P, V] (None when greedy).
        """
        assert self.drafter is not None
        assert self.policy is not None
        in_view = self.executor.mark_open(cache.view_slots(cache.length_bound))
        # With graphs, trees of all sizes share them.
        depth = self.policy.max_depth if self.executor.has_graphs else policy.max_depth
        vocab_size = self.target.vocab_size
        # Prompts and slots that waited differ in width every time: they are not worth a graph each.
        has_graph = slots.width == self.num_depths or not self.executor.has_graphs
        run = self.executor.run_fixed if has_graph else run_eagerly
        root_ids, draft, noise = run(
            _extend, self.drafter, state, sampler, slots, cache.lengths, in_view, depth + 1, vocab_size
        )
        seeds = None
        if self.rule.draws_drafts and sampler.row_seeds is not None:
            seeds = derive_seeds(sampler.row_seeds, DRAFT_STREAM, cache.lengths)
        sampling = DraftSampling(
            warp=sampler.warp_draft if sampler.do_sample else None,
            noise=noise if self.is_coupled else None,
            seeds=seeds,
            vocab_size=vocab_size,
        )
        tree = policy.grow(self.drafter, state, root_ids, draft, sampling, run=self.executor.run)
        tree.max_depth = depth
        return tree, noise

    def catch_up(self, state: Any, cache: TreeCache, slots: NewSlots) -> None:
        """Hands certain slots to the drafter, which drafts nothing. It runs eagerly (see `draft`)."""
        assert self.drafter is not None
        max_slots = cache.view_slots(cache.length_bound).shape[0]
        self.drafter.extend(state, slots.features, slots.next_ids, slots.counts, max_slots=max_slots)

    def draft_nothing(self, cache: TreeCache, sampler: Sampler, slots: NewSlots) -> tuple[TokenTree, Tensor | None]:
        """A tree of the root only, and the noise of its one draw [B, 1, V] (None when greedy)."""
        run = self.executor.run if slots.width in (1, self.num_depths) else run_eagerly
        tree, noise = run(_plant_root, sampler, slots.next_ids, slots.counts, cache.lengths, self.target.vocab_size)
        return tree, noise

    def verify(self, cache: TreeCache, tree: TokenTree) -> TargetOutput:
        """Logits [B, N, V] and features [B, N, F] of the tree's nodes, from one forward pass of the target."""
        cache.open_slots(max(tree.num_nodes, self.target.least_rows))
        for slots in (cache.slots_in_view, *cache.window_sizes.values()):
            self.executor.mark_open(slots)
        if self._compiles_prompts:
            # A bound that one graph can have for all: prompts are chains of a chunk.
            tree = replace(tree, max_depth=max(COMPILED_CHUNK, self.num_depths) - 1)
        if (self.has_choice or self._compiles_prompts) and tree.num_nodes > 1:
            # One graph for trees of all sizes and prompts: each would have its own packed copy of the weights.
            for nodes in (tree.token_ids, tree.parents, tree.depths, cache.slots):
                self.executor.mark_open(nodes, dim=1)
        output: TargetOutput = self.executor.run_fixed(
            self.target.verify, cache, tree, feature_layers=self.feature_layers
        )
        return output

    def accept(self, sampler: Sampler, tree: TokenTree, *args: Any, **kwargs: Any) -> Acceptance:
        """The rule's acceptance; arguments as in `accept_exact`."""
        run = run_eagerly if sampler.is_lazy else self.executor.run
        if sampler.texts is not None:
            self.executor.mark_open(sampler.texts.places)
        accept = self.rule.accept if sampler.do_sample and tree.num_nodes > 1 else accept_exact
        accepted: Acceptance = run(accept, sampler, tree, *args, **kwargs)
        return accepted

    def commit(
        self,
        cache: TreeCache,
        tree: TokenTree,
        accepted: Acceptance,
        counts: Tensor,
        features: Tensor | None,
        *,
        is_counting: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Keeps the accepted nodes in the cache.

        Returns:
            their features [B, P, F], or None; and if `is_counting`, `count_accepted` of the policy.
        """
        is_chain = self.policy is None or self.policy.is_chain
        kept = self.executor.run(_commit, cache, accepted.path, counts, features, is_chain)
        cache.raise_bound(accepted.path.shape[1])
        counted = None
        if is_counting:
            assert self.policy is not None
            counted = self.executor.run(self.policy.count_accepted, tree, accepted.path, counts)
        return kept, counted


def _extend(
    drafter: Drafter,
    state: Any,
    sampler: Sampler,
    slots: NewSlots,
    lengths: Tensor,
    in_view: Tensor,
    num_depths: int,
    vocab_size: int,
) -> tuple[Tensor, DraftLogits, Tensor | None]:
    """The roots [B], their children's scores, and the step's noise."""
    noise = sampler.draw_noise(lengths, num_depths, vocab_size)
    draft = drafter.extend(state, slots.features, slots.next_ids, slots.counts, max_slots=in_view.shape[0])
    return slots.last_ids, draft, noise


def _plant_root(
    sampler: Sampler, next_ids: Tensor, counts: Tensor, lengths: Tensor, vocab_size: int
) -> tuple[TokenTree, Tensor | None]:
    return TokenTree.from_root(NewSlots(None, next_ids, counts).last_ids), sampler.draw_noise(lengths, 1, vocab_size)


def _commit(cache: TreeCache, path: Tensor, counts: Tensor, features: Tensor | None, is_chain: bool) -> Tensor | None:
    cache.keep(path, counts, is_chain=is_chain)
    return None if features is None else features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
