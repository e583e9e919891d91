"""Drafter: the interface between the decode loop and a model or method that proposes tokens.

Legend: B batch, S slots of one call, W frontier nodes of one tree level, C candidate columns, F feature width.

A slot is the input of a drafter at one position. The frontier is the nodes of a tree level that get children.

Draft slot t pairs the target's feature of position t with the token at position t + 1 (EAGLE, arXiv 2401.15077,
section 3.1). A drafter that needs only one of the two ignores the other. The root of a tree is the last
accepted token.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.inference.cache.kv_cache import KVCache
from draftsmith.inference.drafters.row_state import RowState
from draftsmith.inference.targets.target import Target

PREFILL_CHUNK = 512  # tokens of a row per eager forward pass over prompts, and slots of a row per call of `extend`


@dataclass(frozen=True)
class DraftLogits:
    """Scores for the children of W frontier nodes.

    Attributes:
        logits: [B, W, C], or [B, 1, C] when every frontier node shares them; unnormalised log-probabilities of any
            floating dtype. A column of -inf is no candidate.
        token_ids: the target's token id of each column: None (the column number is the id), [C], or [B, W, C]; int64.
    """

    logits: Tensor
    token_ids: Tensor | None = None


# Not a subclass of `ABC`: its `__slots__` would keep FSDP from changing the class of heads.
class Drafter(metaclass=ABCMeta):
    """The methods that the decode loop calls. Trained heads are drafters, and so are drafters without training.

    A subclass implements `start`, `extend` and `expand`. Everything else has a default that suits most kinds.

    A step calls `extend` with the newly accepted tokens, then `expand` once for each further level of the tree.
    """

    feature_layers: tuple[int, ...] = ()
    """Indices into transformers' `hidden_states` (0 = embeddings, n = after the final norm). `extend` gets these states
    of the target, concatenated on the last dimension in this order; () = none."""

    max_depth: int | None = None
    """The deepest tree level the drafter can propose; None = any."""

    drafts_chains_only: bool = False
    """Whether it can expand only one node of each level."""

    reads_first_token: bool = False
    """Whether it needs a text's first token, which no slot holds. The loop then calls `read_first`."""

    reads_last_only: bool = False
    """Whether a draft depends on the last token and its features only. Then those before it are not read."""

    shares_target_cache: bool = False
    """Whether it runs layers of the target itself, in the target's cache (Kangaroo). The loop then calls
    `share_cache`."""

    can_copy_rows: bool = False
    """Whether `copy_rows`, `keep_rows` and `add_rows` work, which ask the state (a `RowState`, or None) by default.
    Without them finished rows stay in the batch, a shared beginning of several prompts is read once for each of them,
    and `reuse_cache` and serving are refused."""

    has_static_state: bool = False
    """Whether what a state holds from one `extend` to the next stays at its addresses, so that a runner can replay
    drafts. The state is a `RowState`, or None. It is started with as many rows as will ever be decoded together, and
    `restart` begins other texts with it."""

    def for_target(self, target: Target) -> Drafter:
        """The drafter that a decoder of this target uses. The default is the drafter itself; trained heads return a
        view of themselves that is bound to the target.

        Raises:
            ValueError: the drafter does not fit the target.
        """
        return self

    @abstractmethod
    def start(self, batch_size: int, max_length: int, num_scratch: int) -> Any:
        """A fresh state for rows of at most `max_length` tokens, and trees of at most `num_scratch` frontier nodes in
        all levels together."""

    def restart(self, state: Any, num_rows: int) -> None:
        """Begins other texts with a state, in place: it forgets what it has read. Called only with `has_static_state`.

        Args:
            num_rows: at most as many as it was started with.
        """
        if (own := self._rows_of(state)) is not None:
            own.reset(num_rows)

    def share_cache(self, state: Any, cache: KVCache) -> None:
        """Lends the target's cache to a drafter with `shares_target_cache`. Called after `start`, `restart`,
        `keep_rows` and `add_rows`.

        Whenever `extend` or `expand` is called, `cache` holds the accepted tokens without the root, and every row has
        `num_scratch` + 1 free slots after them for the draft. While prompts are read, it may hold more: the root of a
        row that ends within a chunk, or the whole prompt. The scores that `extend` then returns are ignored.
        """

    def read_source(self, state: Any, token_ids: Tensor, mask: Tensor) -> None:
        """Reads the source texts [B, E] int64 of an encoder-decoder target; mask [B, E] is 1 on real tokens. Called
        once, after `start`."""

    def read_first(self, state: Any, token_ids: Tensor) -> None:
        """Reads the texts' first tokens [B] int64, for a drafter with `reads_first_token`. Called once, before the
        first `extend`."""

    @abstractmethod
    def extend(
        self, state: Any, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        """Reads accepted slots, forgets the last draft, and scores the children of the root. A long prompt comes in
        several calls, with at most `PREFILL_CHUNK` slots in each.

        Args:
            state: from `start`; updated in place.
            features: [B, S, F] the target's features of the S positions, or None when `feature_layers` is empty.
            next_token_ids: [B, S] int64, the token one position after each feature; the last real one is the root.
            counts: [B] int64; only the first counts[b] slots of row b are real. 0 leaves the row as it was; its scores
                are then unspecified.
            max_slots: the largest number of accepted slots of any row after this call. It is a host integer, so that
                sizing the attention needs no synchronisation.

        Returns:
            [B, 1, C] scores of the root's children.
        """

    @abstractmethod
    def expand(self, state: Any, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        """Scores the children of one level's frontier nodes.

        Args:
            state: as in `extend`; the frontier is added to its tree rows.
            token_ids: [B, W] int64, the frontier nodes' target token ids.
            parents: [B, W] int64, each node's parent as an index into the PREVIOUS frontier (all 0 at depth 1).
            depth: the frontier's depth; 1 = children of the root.

        Returns:
            [B, W or 1, C] scores of the frontier nodes' children.
        """

    def copy_rows(self, state: Any, source: Any, rows: Tensor, lengths: Tensor, *, max_slots: int) -> None:
        """Fills a state with rows of another one, or its own, as if it had read their first slots itself.

        A row keeps its first token (`read_first` is not called again), however few slots are kept. The states share
        nothing. The draft is not copied, so the next call is an `extend`, whose counts may be 0.

        Args:
            state: for B' rows, just returned by `start` or restarted, with any `max_length` and `num_scratch`; or
                `source` itself. A drafter with `shares_target_cache` is given its cache, filled with the same rows,
                before the next `extend`.
            source: any state of this drafter.
            rows: [B'] int64, the row of `source` that becomes each row. A row may be used more than once, or never.
            lengths: [B'] int64, how many of its first accepted slots are kept: none to all, and no more than fit.
            max_slots: the host's bound of `lengths`; nothing beyond it is copied.

        Raises:
            NotImplementedError: `can_copy_rows` is false, or the state is of a class that cannot.
        """
        if (own := self._rows_of(state)) is not None:
            own.copy_rows(source, rows, lengths, max_slots)

    def keep_rows(self, state: Any, rows: Sequence[int]) -> None:
        """Keeps some rows of a state, in place: row i becomes the present row rows[i] >= i. The others are forgotten.

        The draft is not kept, so the next call is an `extend`. Called only with `can_copy_rows`. A drafter with
        `shares_target_cache` is lent the cache, which has lost the same rows, again.
        """
        if (own := self._rows_of(state)) is not None:
            own.keep_rows(rows)

    def add_rows(self, state: Any, other: Any, *, max_slots: int) -> None:
        """Adds the rows of another state, of the same `max_length` and `num_scratch`, after the present rows of
        `state`, in place. The states share nothing then.

        The draft is not kept, so the next call is an `extend`. Called only with `can_copy_rows`. A drafter with
        `shares_target_cache` is lent the cache, which has gained the same rows, again.

        Args:
            max_slots: no row of `other` has read more slots.
        """
        if (own := self._rows_of(state)) is not None:
            own.add_rows(other, max_slots)

    def _rows_of(self, state: Any) -> RowState | None:
        own = type(self).__name__
        if not (self.can_copy_rows or self.has_static_state):
            raise NotImplementedError(f"{own} cannot copy, drop or add rows: can_copy_rows is False")
        if state is None or isinstance(state, RowState):
            return state
        raise NotImplementedError(
            f"{own} has can_copy_rows or has_static_state, and its state is a {type(state).__name__}: derive that "
            "from RowState, or implement restart, copy_rows, keep_rows and add_rows"
        )
