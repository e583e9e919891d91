"""One step of decoding: draft a token tree, verify it in one forward pass, accept, commit.

Legend: B rows, N tree nodes, P path length (tree depth + 1), W pending tokens, S cache slots in view, F feature width,
V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.acceptance.exact import Acceptance, accept_exact
from draftsmith.inference.acceptance.rejection import DRAFT_STREAM
from draftsmith.inference.acceptance.rules import EXACT, AcceptanceRule
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.cache.kv_cache import VIEW_MULTIPLE, KVCache, Span
from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.sampling import DraftSampling
from draftsmith.inference.noise import derive_seeds
from draftsmith.inference.state import DecodeState
from draftsmith.inference.stats import PhaseClock
from draftsmith.inference.targets.backbone import TargetOutput
from draftsmith.inference.targets.probing.invariance import check_depth
from draftsmith.inference.targets.target import Target
from draftsmith.inference.trees.batch_tree import BatchTree
from draftsmith.inference.trees.candidates import CandidateTrees
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.token_tree import TokenTree

# Capacities of caches are rounded up: to powers of two where shapes are fixed, so that few occur.
CAPACITY_MULTIPLE = 256
FIXED_CAPACITY = 1024
# Tokens of a row per pass of `verify` over prompts. From 128 on attention takes another way.
VERIFIED_CHUNK = 120


@dataclass
class StepOutput:
    """What a step gave.

    Attributes:
        policy: that drafted the tree; None = nothing was drafted.
        target: of the tree's nodes; of a first token, of the prompt's last one.
        emitted: [B, ...] int64, what the host reads: P tokens, how many of them are real, then, where somebody asks,
            the bits of P log-probabilities, and what each of the planner's candidates would have accepted.
        has_probabilities: whether the log-probabilities are there.
        is_first: whether these are the tokens after the prompts.
    """

    policy: TreePolicy | None
    tree: TokenTree
    target: TargetOutput
    accepted: Acceptance
    emitted: Tensor
    has_probabilities: bool = False
    is_first: bool = False


def read_pending(state: DecodeState, drafter: Drafter, width: int, max_slots: int) -> DraftLogits:
    """The drafter reads the pending tokens, `width` columns of them, and scores the children of the roots."""
    features = None if state.pending_features is None else state.pending_features[:, :width]
    scores = drafter.extend(state.draft, features, state.pending_ids[:, :width], state.num_pending, max_slots=max_slots)
    state.num_pending.zero_()
    return scores


def begin_draft(
    state: DecodeState,
    drafter: Drafter,
    sampler: Sampler,
    width: int,
    in_view: Tensor,
    num_depths: int,
    vocab_size: int,
) -> tuple[Tensor, DraftLogits, Tensor | None]:
    """`read_pending`, with what else a draft begins with.

    Args:
        in_view: [S], of which only the shape matters.

    Returns:
        the roots [B], their children's scores, and the step's noise [B, num_depths, V] (None when greedy).
    """
    noise = sampler.draw_noise(state.cache.lengths, num_depths, vocab_size)
    return state.roots, read_pending(state, drafter, width, in_view.shape[0]), noise


def plant_root(state: DecodeState, sampler: Sampler, vocab_size: int) -> tuple[TokenTree, Tensor | None]:
    """A tree of the root only, and the noise of its one draw [B, 1, V] (None when greedy)."""
    return TokenTree.from_root(state.roots), sampler.draw_noise(state.cache.lengths, 1, vocab_size)


def draft(
    step: Step,
    state: DecodeState,
    policy: TreePolicy,
    sampler: Sampler,
    width: int,
    in_view: Tensor,
    *,
    begin: Callable[..., tuple[Tensor, DraftLogits, Tensor | None]] = begin_draft,
) -> tuple[TokenTree, Tensor | None]:
    """Hands the pending tokens, `width` columns of them, to the drafter and grows a tree.

    Args:
        in_view: [S], of which only the shape matters.

    Returns:
        the tree, and the step's noise [B, P, V] (None when greedy).
    """
    assert step.drafter is not None
    assert step.policy is not None
    depth = step.policy.max_depth if step.runner.has_fixed_rows else policy.max_depth  # one size of noise for all trees
    vocab_size = step.target.vocab_size
    roots, scores, noise = begin(state, step.drafter, sampler, width, in_view, depth + 1, vocab_size)
    seeds = None
    if step.rule.draws_drafts and sampler.row_seeds is not None:
        seeds = derive_seeds(sampler.row_seeds, DRAFT_STREAM, state.cache.lengths)
    sampling = DraftSampling(
        warp=sampler.warp_draft if sampler.do_sample else None,
        noise=noise if step.is_coupled else None,
        seeds=seeds,
        vocab_size=vocab_size,
    )
    tree = policy.grow(step.drafter, state.draft, roots, scores, sampling)
    tree.max_depth = depth
    return tree, noise


def verify(step: Step, cache: KVCache, tree: TokenTree) -> TargetOutput:
    """Logits [B, N, V] and features [B, N, F] of the nodes, whose slots are open, from one pass of the target."""
    return step.target.verify(cache, tree, feature_layers=step.feature_layers)


def accept(
    state: DecodeState, tree: TokenTree, logits: Tensor, noise: Tensor | None, sampler: Sampler, rule: AcceptanceRule
) -> Acceptance:
    """The drafted tokens that are kept, and the bonus token."""
    judge = rule.accept if sampler.do_sample and tree.num_nodes > 1 else accept_exact
    return judge(sampler, tree, logits, state.cache.lengths, noise=noise)


def commit(
    state: DecodeState,
    tree: TokenTree,
    accepted: Acceptance,
    features: Tensor | None,
    *,
    is_chain: bool,
    records_probabilities: bool,
    counting: CandidateTrees | None,
) -> Tensor:
    """Keeps the accepted nodes in the cache, and adds their tokens to the texts and to what the drafter is to read.

    Args:
        counting: tells what its candidates would have accepted.

    Returns:
        [B, ...] int64, as in `StepOutput.emitted`.
    """
    counts = accepted.counts * state.active
    path, tokens = accepted.path, accepted.next_tokens
    state.cache.commit(path, counts, is_chain=is_chain)
    kept = None if features is None else features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
    state.append(tokens.clamp(min=0), counts, kept)
    columns = [tokens, counts[:, None]]
    if records_probabilities:
        columns.append(tree.log_probs.gather(1, path).view(torch.int32))
    if counting is not None:
        columns.append(counting.count_accepted(tree, path, counts))
    return torch.cat(columns, dim=1)


@dataclass(frozen=True)
class Runner:
    """How the functions of a step run. By default they run as they are.

    Attributes:
        draft, plant_root, verify, accept, commit: what runs in the place of the functions above.
        has_fixed_rows: finished rows stay in the batch, and shapes repeat from step to step.
        reads_prompts: whether `verify` serves any number of nodes at full speed, and so prompts.
        view_multiple: views of the cache are rounded up to a multiple of this many slots.
        active: the context in which functions run.
        seconds: how long preparing functions has taken so far.
        forget: drops what belongs to states that are no longer used.
    """

    name: str = "eager"
    draft: Callable[..., tuple[TokenTree, Tensor | None]] = draft
    plant_root: Callable[..., tuple[TokenTree, Tensor | None]] = plant_root
    verify: Callable[[Step, KVCache, TokenTree], TargetOutput] = verify
    accept: Callable[..., Acceptance] = accept
    commit: Callable[..., Tensor] = commit
    has_fixed_rows: bool = False
    reads_prompts: bool = False
    view_multiple: int = VIEW_MULTIPLE
    active: Callable[[Target], AbstractContextManager[None]] = lambda target: target.backbone.hold_attention()
    seconds: Callable[[], float] = float
    forget: Callable[[], None] = lambda: None


class Step:
    """Runs the four functions on a state, one after the other.

    Args:
        drafter, policy: None for plain decoding.
        is_coupled: drafts read the target's own noise (see `Decoder`), if the rule allows it.
        rule: which drafted tokens are kept.

    Attributes:
        num_nodes: of the largest tree.
        path_width: P of the largest tree: the tokens that one step can emit, at most.

    Raises:
        ValueError: a `BatchTree` where rows cannot share a budget.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: TreePolicy | None,
        *,
        is_coupled: bool = True,
        rule: AcceptanceRule = EXACT,
        runner: Runner | None = None,
    ) -> None:
        self.target, self.drafter, self.policy, self.rule = target, drafter, policy, rule
        self.runner = runner or Runner()
        self.num_nodes = 1 if policy is None else policy.num_nodes
        self.path_width = 1 if policy is None else 1 + min(policy.max_depth, policy.num_nodes - 1)
        check_depth(target, self.path_width - 1)
        self.is_coupled = is_coupled and rule.may_couple
        self.feature_layers = drafter.feature_layers if drafter is not None else ()
        if isinstance(policy, BatchTree) and not self.batch_trees:
            raise ValueError(
                "tree is a BatchTree, which needs exact acceptance, eager steps, a drafter that can copy rows and a "
                "target on a CPU that is neither recurrent, an encoder-decoder model nor batch-invariant, and whose "
                "attention can be replaced: tree='auto' takes one where it can"
            )

    def __call__(
        self,
        state: DecodeState,
        policy: TreePolicy | None,
        sampler: Sampler,
        clock: PhaseClock,
        *,
        is_counting: bool = False,
        records_probabilities: bool = False,
    ) -> StepOutput:
        """One step of all rows.

        Args:
            policy: drafts the tree; None = plain decoding.
            is_counting: hand out what the candidates of a policy to choose from would have accepted.
            records_probabilities: hand out the drafter's log-probabilities of the accepted drafts.
        """
        run, state.is_whole = self.runner, False
        span = state.open_step(self.path_width, shows_texts=sampler.texts is not None)
        in_view = state.cache.view_slots(span.longest)
        if policy is None:
            if self.drafter is not None and not state.has_room(1):
                state.catch_up(in_view.shape[0])
            tree, noise = run.plant_root(state, sampler, self.target.vocab_size)
        else:
            width = max(state.pending_bound, self.path_width if run.has_fixed_rows else 1)
            tree, noise = run.draft(self, state, policy, sampler, width, in_view)
            state.pending_bound = 0
        clock.stop("draft")
        output = self.verify(state.cache, tree, span)
        clock.stop("verify")
        judge = accept if sampler.is_lazy else run.accept  # processors that keep a state read on the host
        accepted = judge(state, tree, output.logits, noise, sampler, self.rule)
        clock.stop("accept")
        emitted = run.commit(
            state,
            tree,
            accepted,
            output.features,
            is_chain=policy is None or policy.is_chain,
            records_probabilities=records_probabilities,
            counting=self.policy if is_counting and isinstance(self.policy, CandidateTrees) else None,
        )
        state.pending_bound += accepted.path.shape[1]
        clock.stop("commit")
        return StepOutput(policy, tree, output, accepted, emitted, records_probabilities)

    def verify(self, cache: KVCache, tree: TokenTree, span: Span) -> TargetOutput:
        """One forward pass over all nodes, in new slots."""
        cache.open_slots(max(tree.num_nodes, self.target.min_pass_tokens), span)
        return self.runner.verify(self, cache, tree)

    def active(self) -> AbstractContextManager[None]:
        """The context in which functions run, of prompts and of steps."""
        return self.runner.active(self.target)

    def first(self, state: DecodeState, read: TargetOutput, sampler: Sampler) -> StepOutput:
        """The tokens after the prompts, from what `prefill` returned."""
        if read.features is not None:
            state.hold_features(read.features)
        # The first token's "tree" is the last prompt token, which is already committed.
        tree = TokenTree.from_root(state.roots)
        accepted = accept_exact(sampler, tree, read.logits, state.cache.lengths - 1)
        state.append(accepted.next_tokens.clamp(min=0), accepted.counts, read.features)
        state.pending_bound += 1
        emitted = torch.cat([accepted.next_tokens, accepted.counts[:, None]], dim=1)
        return StepOutput(None, tree, read, accepted, emitted, is_first=True)

    @property
    def num_slots_after(self) -> int:
        """Cache slots that a step may write to after a row's committed tokens."""
        num_nodes = max(self.num_nodes, self.target.min_pass_tokens)
        if self.policy is None or self.drafter is None or not self.drafter.shares_target_cache:
            return num_nodes
        # Drafting may begin on rows that have just emitted more than their text's length.
        return max(num_nodes, self.path_width + 1 + self.policy.num_scratch)

    @property
    def batch_trees(self) -> tuple[BatchTree, ...]:
        """What rows may draft that share a budget, if anything: where other drafts change no text, rows that have ended
        take no part, and trees of different sizes are read without padding."""
        tree = self.policy.batch_tree if isinstance(self.policy, CandidateTrees) else self.policy
        may_share = self.rule is EXACT and self.rows_may_leave and self.target.reads_ragged_rows
        return (tree,) if isinstance(tree, BatchTree) and may_share else ()

    @property
    def verifies_prompts(self) -> bool:
        """Whether short prompts are read by `verify`. Plain decoding verifies one token only, and where scores must not
        depend on the drafter, it reads as plain."""
        return self.runner.reads_prompts and self.policy is not None and not self.target.is_batch_invariant

    @property
    def rows_may_leave(self) -> bool:
        """Whether finished rows leave the batch."""
        return not self.runner.has_fixed_rows and (self.drafter is None or self.drafter.can_copy_rows)

    def new_state(self, num_rows: int, num_slots: int, num_tokens: int) -> DecodeState:
        """A state for so many rows.

        Args:
            num_slots: of a row in the cache, those of a step behind its end included.
            num_tokens: of a row as processors see it, padding included, without those of a step behind its end.
        """
        cache = self.target.new_cache(num_rows, self.round_capacity(num_slots))
        cache.view_multiple = self.runner.view_multiple
        return DecodeState(
            cache,
            self.drafter,
            num_scratch=0 if self.policy is None else self.policy.num_scratch,
            num_tokens=self.round_capacity(num_tokens + self.path_width),
            path_width=self.path_width,
            may_decline=isinstance(self.policy, CandidateTrees),
        )

    def round_capacity(self, capacity: int) -> int:
        """A size of buffers with an entry per token, at least `capacity`."""
        if self.runner.has_fixed_rows:
            # Never all in view: a view of everything is contiguous, which would be one more kind of tensor.
            return max(FIXED_CAPACITY, 1 << (capacity - 1).bit_length()) + VIEW_MULTIPLE
        return -(-capacity // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
