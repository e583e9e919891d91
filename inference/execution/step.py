"""One step of the decode loop as functions of tensors: draft a tree, verify it, accept a path, commit it.

With `compile`, each becomes one graph of torch.compile. Its shapes are static but for the number of cache slots in
view, which is taken from a tensor's shape, so that one graph serves every length of the text; whatever else changes at
every step stays outside or in a tensor.

Legend: B batch, S slots handed to the drafter, N tree nodes, P path length (tree depth + 1), F feature width, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inference.acceptance.exact import Acceptance, Sampler
from inference.acceptance.rejection import DRAFT_STREAM
from inference.acceptance.rules import EXACT, AcceptanceRule
from inference.cache.source import Source
from inference.cache.tree_cache import VIEW_MULTIPLE, TreeCache
from inference.drafters.base import Drafter, DraftLogits
from inference.drafters.sampling import DraftDraws, DraftSampling
from inference.execution.compiled import Function, StepCompiler
from inference.noise import derive_seeds
from inference.planning.auto_tree import AutoTree
from inference.stats import GenerationStats
from inference.targets.target import Target, TargetOutput
from inference.trees.beam import Children, Pool, choose_best, expand_level, top_candidates
from inference.trees.policy import DynamicTree, StaticTree, TreePolicy
from inference.trees.token_tree import TokenTree

# Capacities of caches are rounded up: to powers of two when compiled, since each is a graph of its own.
CAPACITY_MULTIPLE = 256
COMPILED_CAPACITY = 1024
CHANCE_UNIT = 1_000_000  # chances travel to the host as integers


@dataclass
class NewSlots:
    """Slots that became certain and that the drafter has not seen: features [B, S, F] (None when it reads none); the
    tokens one position later next_ids [B, S]; counts [B] real slots per row."""

    features: Tensor | None
    next_ids: Tensor
    counts: Tensor

    @property
    def last_ids(self) -> Tensor:
        """Each row's last real token [B]: the root of its next tree."""
        return self.next_ids.gather(1, (self.counts - 1).clamp(min=0)[:, None])[:, 0]

    def select(self, rows: Sequence[int]) -> NewSlots:
        """Those of these rows."""
        rows = list(rows)
        return NewSlots(None if self.features is None else self.features[rows], self.next_ids[rows], self.counts[rows])


@dataclass(frozen=True)
class OpenedDraft:
    """A draft whose tree is still to be grown.

    root_ids: [B]; children: for each width of beam, the root's; chances: [B, 1] long, the drafter's chance of the best
    of them, in `CHANCE_UNIT`; noise: [B, depth + 1, V], or None when greedy.
    """

    root_ids: Tensor
    children: dict[int, Children]
    chances: Tensor
    noise: Tensor | None


class DecodeStep:
    """The parts of a step, eager or compiled.

    Args:
        drafter, policy: None for plain decoding.
        is_coupled: drafts read the target's own noise (see `Decoder`), if the rule allows it.
        rule: what is kept of a tree.
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
        rule: AcceptanceRule = EXACT,
    ) -> None:
        self.target = target
        self.drafter = drafter
        if compile and isinstance(policy, StaticTree) and policy.is_chain and not rule.draws_drafts:
            # The same chain, of which one graph serves all levels (see `grow`).
            policy = DynamicTree(policy.max_depth, 1, policy.num_nodes, root_factor=1)
        self.policy = policy
        self.is_coupled = is_coupled and rule.may_couple
        self.rule = rule
        self.feature_layers = drafter.feature_layers if drafter is not None else ()
        self.stats = GenerationStats()  # of the present call
        self._compiler: StepCompiler | None = None
        if compile:
            modules = [part for part in (target.model, drafter) if isinstance(part, nn.Module)]
            self._compiler = StepCompiler(modules, self._book_compiling)
        self._draft = self._compile(self._draft_eagerly)
        self._open = self._compile(self._open_eagerly)
        # Automatic, since the drafter's state counts its slots, and one graph serves beams of all widths.
        self._expand = self._compile(self._expand_eagerly, is_automatic=True)
        self._verify = self._compile(self._verify_eagerly)
        # No weights are read here, so one graph may serve trees of every size as fast.
        self._start_plain = self._compile(self._start_plain_eagerly, is_automatic=True)
        self._choose = self._compile(choose_best, is_automatic=True)
        self._accept = self._compile(rule.accept, is_automatic=True)
        self._commit = self._compile(self._commit_eagerly, is_automatic=True)

    @property
    def is_compiled(self) -> bool:
        return self._compiler is not None

    def active(self) -> AbstractContextManager[None]:
        """A step's functions are called inside this block."""
        return self._compiler.active() if self._compiler is not None else nullcontext()

    @property
    def num_nodes(self) -> int:
        return self.policy.num_nodes if self.policy is not None else 1

    @property
    def num_depths(self) -> int:
        """Tokens one step can emit: `path_width` of its trees."""
        return 1 + min(self.policy.max_depth, self.num_nodes - 1) if self.policy is not None else 1

    @property
    def num_slots_behind(self) -> int:
        """Cache slots that a step may write to behind a row's committed tokens."""
        if self.policy is None or self.drafter is None or not self.drafter.shares_target_cache:
            return self.num_nodes
        # Drafting may begin on rows that have just emitted more than their text's length.
        return max(self.num_nodes, self.num_depths + 1 + self.policy.num_scratch)

    def start_drafter(self, cache: TreeCache) -> Any:
        """The drafter's state for texts in this cache."""
        assert self.drafter is not None
        assert self.policy is not None
        state = self.drafter.start(cache.batch_size, cache.capacity, self.policy.num_scratch)
        if self.drafter.shares_target_cache:
            self.drafter.share_cache(state, cache)
        return state

    def read_source(self, state: Any, cache: TreeCache, source: Source) -> None:
        """Tells an encoder-decoder target, and a drafter that asks, what the texts in this cache are about."""
        self.target.read_source(cache, source)
        if self.drafter is not None:
            self.drafter.read_source(state, source.token_ids, source.mask)

    def new_cache(self, batch_size: int, capacity: int) -> TreeCache:
        """A cache of at least so many slots per row."""
        if self.is_compiled:
            # Never all in view: a view of everything is contiguous, which would make one more graph.
            rounded = max(COMPILED_CAPACITY, 1 << (capacity - 1).bit_length()) + VIEW_MULTIPLE
        else:
            rounded = -(-capacity // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
        return self.target.new_cache(batch_size, rounded)

    def draft(self, state: Any, cache: TreeCache, sampler: Sampler, slots: NewSlots) -> tuple[TokenTree, Tensor | None]:
        """Hands the newly certain slots to the drafter and grows the tree.

        Returns:
            the tree, and the step's noise [B, P, V] (None when greedy).
        """
        if type(self.policy) is DynamicTree:  # a subclass may grow its trees in another way
            opened = self.open(state, cache, sampler, slots)
            return self.grow(state, sampler, opened, self.policy), opened.noise
        if self.drafter is None:
            return self.start_plain(cache, sampler, slots)
        call = self._draft if self._has_usual_width(slots) else self._draft_eagerly
        return call(state, cache.lengths, sampler, slots, self._view_certain(cache))

    def _draft_eagerly(
        self, state: Any, lengths: Tensor, sampler: Sampler, slots: NewSlots, in_view: Tensor
    ) -> tuple[TokenTree, Tensor | None]:
        assert self.policy is not None
        draft, noise = self._extend(state, lengths, sampler, slots, in_view)
        sampling = self._sampling(sampler, noise, lengths)
        tree = self.policy.grow(self.drafter, state, slots.last_ids, draft, sampling)  # type: ignore[arg-type]
        return tree, noise

    def start_plain(self, cache: TreeCache, sampler: Sampler, slots: NewSlots) -> tuple[TokenTree, Tensor | None]:
        """`draft` without a drafter: a root alone, and the noise of its one draw."""
        is_usual = slots.next_ids.shape[1] in (1, self.num_depths)
        call = self._start_plain if is_usual else self._start_plain_eagerly
        return call(cache.lengths, sampler, slots.next_ids, slots.counts)

    def _start_plain_eagerly(
        self, lengths: Tensor, sampler: Sampler, next_ids: Tensor, counts: Tensor
    ) -> tuple[TokenTree, Tensor | None]:
        noise = sampler.draw_noise(lengths, 1, self.target.vocab_size)
        return TokenTree.from_root(NewSlots(None, next_ids, counts).last_ids), noise

    def open(self, state: Any, cache: TreeCache, sampler: Sampler, slots: NewSlots) -> OpenedDraft:
        """The first half of `draft`, for dynamic trees and those of chosen sizes."""
        call = self._open if self._has_usual_width(slots) else self._open_eagerly
        return call(state, cache.lengths, sampler, slots, self._view_certain(cache))

    def _open_eagerly(
        self, state: Any, lengths: Tensor, sampler: Sampler, slots: NewSlots, in_view: Tensor
    ) -> OpenedDraft:
        assert isinstance(self.policy, (AutoTree, DynamicTree))
        draft, noise = self._extend(state, lengths, sampler, slots, in_view)
        factor = self.policy.root_factor
        top, ids = top_candidates(draft, self._sampling(sampler, noise), 0, factor * self.policy.top_k)
        widths = self.policy.widths if isinstance(self.policy, AutoTree) else (self.policy.top_k,)
        children = {
            width: Children.of_root(top[:, 0, : factor * width], ids[:, 0, : factor * width], width, factor)
            for width in widths
        }
        return OpenedDraft(slots.last_ids, children, (top[:, 0, :1].exp() * CHANCE_UNIT).long(), noise)

    def _extend(
        self, state: Any, lengths: Tensor, sampler: Sampler, slots: NewSlots, in_view: Tensor
    ) -> tuple[DraftLogits, Tensor | None]:
        """The root's children's scores, and the step's noise."""
        assert self.drafter is not None
        assert self.policy is not None
        noise = sampler.draw_noise(lengths, self.policy.max_depth + 1, self.target.vocab_size)
        max_slots = in_view.shape[0]
        draft = self.drafter.extend(state, slots.features, slots.next_ids, slots.counts, max_slots=max_slots)
        return draft, noise

    def _has_usual_width(self, slots: NewSlots) -> bool:
        """Prompts and arrears are of another length each time: a graph for each would not pay."""
        return slots.next_ids.shape[1] == self.num_depths

    def _view_certain(self, cache: TreeCache) -> Tensor:
        return self._mark_size(cache.view_slots(cache.length_bound))

    def grow(self, state: Any, sampler: Sampler, opened: OpenedDraft, policy: DynamicTree) -> TokenTree:
        """The second half: a tree of this policy.

        Compiled, one graph serves all levels: weights are packed per graph, and copies of them for every level would
        drive one another out of the processor's caches.
        """

        def expand(level: Children, depth: int) -> Children:
            noise = None if opened.noise is None else opened.noise[:, depth : depth + 1]
            return self._expand(policy.top_k, state, sampler, level, noise, depth)

        pool = Pool.of_levels(policy.grow_levels(opened.children[policy.top_k], expand))
        # One depth for all plans: this, and what follows, is one graph for all of them.
        assert self.policy is not None
        return self._choose(opened.root_ids, pool, policy.num_nodes, self.policy.max_depth)

    def _expand_eagerly(
        self, top_k: int, state: Any, sampler: Sampler, level: Children, noise: Tensor | None, depth: int
    ) -> Children:
        assert self.drafter is not None
        return expand_level(self.drafter, state, level, depth, top_k, self._sampling(sampler, noise))

    def _sampling(self, sampler: Sampler, noise: Tensor | None, lengths: Tensor | None = None) -> DraftSampling:
        warp = sampler.warp_draft if sampler.do_sample else None
        draws = None
        if self.rule.draws_drafts and sampler.row_seeds is not None and lengths is not None:
            draws = DraftDraws(derive_seeds(sampler.row_seeds, DRAFT_STREAM, lengths), self.target.vocab_size, warp)
        return DraftSampling(warp=warp, noise=noise if self.is_coupled else None, draws=draws)

    def verify(self, cache: TreeCache, tree: TokenTree) -> TargetOutput:
        """Logits [B, N, V] and features [B, N, F] of the tree's nodes."""
        self.open_slots(cache, tree)
        return self._verify(cache, tree)

    def open_slots(self, cache: TreeCache, tree: TokenTree) -> None:
        """Cache slots for the tree's nodes; what changes in size from step to step is marked for the compiler."""
        cache.open_slots(tree.num_nodes)
        for slots in (cache.slots_in_view, *cache.window_sizes.values()):
            self._mark_size(slots)
        if isinstance(self.policy, AutoTree) and tree.num_nodes > 1:
            # One graph for trees of all sizes: each would have its own packed copy of the target's weights.
            for nodes in (tree.token_ids, tree.parents, tree.depths, cache.slots):
                self._mark_size(nodes, dim=1)

    def _verify_eagerly(self, cache: TreeCache, tree: TokenTree) -> TargetOutput:
        return self.target.verify_opened(cache, tree, feature_layers=self.feature_layers)

    def accept(
        self, sampler: Sampler, tree: TokenTree, logits: Tensor, root_positions: Tensor, **kwargs: Any
    ) -> Acceptance:
        """The rule's `accept`."""
        call = self._accept if sampler.is_prefix_free else self.rule.accept
        return call(sampler, tree, logits, root_positions, **kwargs)

    def commit(
        self, cache: TreeCache, tree: TokenTree, accepted: Acceptance, counts: Tensor, features: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Keeps the accepted nodes in the cache.

        Returns:
            their features [B, P, F]; and, for trees of chosen sizes, `AutoTree.count_accepted` of the path.
        """
        kept = self._commit(cache, tree, accepted.path, counts, features)
        cache.raise_bound(accepted.path.shape[1])
        return kept

    def _commit_eagerly(
        self, cache: TreeCache, tree: TokenTree, path: Tensor, counts: Tensor, features: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        cache.keep(path, counts, is_chain=self.policy is None or self.policy.is_chain)
        counted = None
        if isinstance(self.policy, AutoTree) and tree.num_nodes > 1:
            counted = self.policy.count_accepted(tree, path, counts)
        if features is None:
            return None, counted
        return features.gather(1, path[..., None].expand(-1, -1, features.shape[-1])), counted

    def _mark_size(self, values: Tensor, dim: int = 0) -> Tensor:
        """Tells the compiler that this size will change."""
        if self.is_compiled:
            torch._dynamo.maybe_mark_dynamic(values, dim)
        return values

    def _compile(self, function: Function, *, is_automatic: bool = False) -> Function:
        return function if self._compiler is None else self._compiler.compile(function, is_automatic=is_automatic)

    def _book_compiling(self, seconds: float) -> None:
        self.stats.seconds["compile"] += seconds
