"""DecodeState: everything that changes while texts are decoded.

Legend: R rows that are allocated, B of them in use, C places for tokens, P path length (tree depth + 1), W pending
tokens, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache.kv_cache import KVCache, Span
from draftsmith.inference.cache.row_selection import first_rows
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.request.row import Row
from draftsmith.inference.request.token_history import TokenHistory

# Tokens of a row, prompt included, that may wait for the drafter. It reads them when it drafts, so a text of which
# nothing is drafted costs it one pass in so many tokens, or none.
CATCH_UP = 256


class DecodeState:
    """The rows of a batch: the target's keys and values, the drafter's state, and the texts.

    Tensors are allocated once and written in place, so they keep their addresses. Rows that leave are overwritten by
    the last ones, rows that join come after the present ones. Of every tensor the first B rows are in use.

    Attributes:
        cache: the target's keys and values; `cache.lengths` [B], committed tokens of each row: all but the newest,
            which is the root of the next tree.
        draft: the drafter's own state; None without a drafter.
        rows: the text in each place.
        tokens: [B, C] int64, texts as transformers shows them to a processor: padding, prompt, new tokens.
        num_tokens: [B] int64, tokens of each text, padding and root included.
        limits: [B] int64, `num_tokens` at which a text ends.
        indices: [B] int64, `Row.index` of each.
        active: [B] int64, 0 for finished rows that are still here.
        pending_ids: [B, W] int64, committed tokens that the drafter has not read.
        pending_features: [B, W, F], the target's feature of the token before each of them; None if nobody reads it.
        num_pending: [B] int64, how many of each row's are real.
        pending_bound: no row has more pending tokens. Host.
        may_wait: whether prompts may be pending, too. Host.
        is_whole: whether no step or prompt is under way, so that the texts are what the cache holds. Host.
    """

    _FIELDS = ("tokens", "num_tokens", "limits", "indices", "active", "pending_ids", "num_pending")

    tokens: Tensor
    num_tokens: Tensor
    limits: Tensor
    indices: Tensor
    active: Tensor
    pending_ids: Tensor
    num_pending: Tensor
    history: TokenHistory

    def __init__(
        self,
        cache: KVCache,
        drafter: Drafter | None,
        *,
        num_scratch: int,
        num_tokens: int,
        path_width: int,
        may_decline: bool = False,
    ) -> None:
        """
        Args:
            num_scratch: frontier nodes of the largest tree.
            num_tokens: C, without the P places that a step may write beyond a text's end.
            path_width: P of the largest tree.
            may_decline: whether there are steps of which nothing is drafted, so that tokens wait.
        """
        self.cache, self.drafter, self.num_scratch = cache, drafter, num_scratch
        self.draft: Any = None
        self._own_draft: Any = None
        self.rows: list[Row] = []
        self.pending_features: Tensor | None = None
        self.pending_bound = 0
        self.is_whole = False
        self.has_media = self.may_wait = False
        self._retired: set[int] = set()
        self._every_place = torch.arange(num_tokens + path_width, device=cache.lengths.device)
        num_rows, self._room = cache.max_batch_size, CATCH_UP if may_decline else 0
        sizes = {"tokens": (num_rows, self.capacity), "pending_ids": (num_rows, self._room + 2 * path_width)}
        with torch.inference_mode(False):  # inference tensors could not be written outside inference mode
            self._buffers = {name: self._every_place.new_zeros(sizes.get(name, (num_rows,))) for name in self._FIELDS}
        self._show(num_rows)

    @property
    def capacity(self) -> int:
        """C, all places included."""
        return self._every_place.shape[0]

    def _show(self, num_rows: int) -> None:
        """From now on the tensors are those of the first `num_rows` rows."""
        for name, buffer in self._buffers.items():
            setattr(self, name, buffer[:num_rows])
        places = self._every_place
        self.history = TokenHistory(self.tokens, self.num_tokens, self.limits, self.indices, places, places)

    def open(self, rows: Sequence[Row], *, has_media: bool = False, may_wait: bool = False) -> None:
        """Begins the texts of these rows: their prompts are known, and nothing has read them."""
        self.is_whole, self.has_media, self.may_wait = False, has_media, may_wait
        self.rows, self.draft, self.pending_bound = list(rows), None, 0
        self._retired.clear()
        self._show(len(rows))
        longest = max(len(row.padded) for row in rows)
        padded = [row.padded + [0] * (longest - len(row.padded)) for row in rows]
        numbers = [(len(row.padded), row.max_padded, row.index) for row in rows]
        device = self.tokens.device
        self.tokens[:, :longest] = torch.tensor(padded, device=device)
        known = torch.tensor(numbers, device=device).T
        for tensor, values in zip((self.num_tokens, self.limits, self.indices), known, strict=True):
            tensor.copy_(values)
        self.active.fill_(1)
        self.num_pending.zero_()

    def start_drafter(self) -> None:
        """Gives the drafter a state that has read nothing of the rows in the cache: with `has_static_state` always the
        same one."""
        if self.drafter is None:
            return
        num_rows, is_static = self.cache.batch_size, self.drafter.has_static_state
        if self._own_draft is None or not is_static:
            with torch.inference_mode(False), torch.no_grad():  # as for the buffers
                self._own_draft = self.drafter.start(
                    self.cache.max_batch_size if is_static else num_rows, self.cache.capacity, self.num_scratch
                )
        self.draft = self._own_draft
        if is_static:
            self.drafter.restart(self.draft, num_rows)
        self._share_cache()

    def _share_cache(self) -> None:
        if self.drafter is not None and self.drafter.shares_target_cache:
            self.drafter.share_cache(self.draft, self.cache)

    @property
    def roots(self) -> Tensor:
        """[B] the newest token of each text."""
        return self.tokens.gather(1, (self.num_tokens - 1)[:, None])[:, 0]

    def open_step(self, num_ahead: int, *, shows_texts: bool) -> Span:
        """How many tokens the running texts hold; tells what shows texts to processors, too.

        Args:
            num_ahead: tokens that the step may emit.
        """
        shortest, longest, most = self.cache.capacity, 0, 0
        for row in self.rows:
            if not row.is_finished:
                num_committed = row.num_committed
                shortest, longest = min(shortest, num_committed), max(longest, num_committed)
                most = max(most, num_committed + 1 + row.num_padding)
        if shows_texts:
            self.history.open_view(most + num_ahead)
        return Span(shortest, longest)

    def append(self, tokens: Tensor, counts: Tensor, features: Tensor | None, *, in_prompt: bool = False) -> None:
        """Adds the first counts[b] of tokens [B, P] to each text, and to what the drafter has not read.

        Args:
            features: [B, P, F], the target's feature of the token before each of them.
            in_prompt: whether the texts have them already.
        """
        steps = self._every_place[: tokens.shape[1]]
        if not in_prompt:
            self.tokens.scatter_(1, self.num_tokens[:, None] + steps, tokens)
            self.num_tokens += counts
        if self.drafter is None:
            return
        places = self.num_pending[:, None] + steps
        self.pending_ids.scatter_(1, places, tokens)
        if features is not None:
            assert self.pending_features is not None
            # On a CPU, torch's scatter_ takes up to a hundred times as long in 16 bits.
            rows = torch.arange(len(places), device=places.device)[:, None]
            self.pending_features.index_put_((rows, places), features)
        self.num_pending += counts

    def hold_features(self, like: Tensor) -> None:
        """Makes room for pending features of the shape [B, *, F] and dtype of `like`, unless there is."""
        if self.pending_features is None:
            shape = (*self._buffers["pending_ids"].shape, like.shape[-1])
            with torch.inference_mode(False):
                self._buffers["pending_features"] = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self.pending_features = self._buffers["pending_features"][: len(self.rows)]

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many more tokens of each row may wait for the drafter."""
        return self.pending_bound + num_tokens <= self._room

    def catch_up(self, max_slots: int) -> None:
        """The drafter reads all that waits but each row's newest token, with which a draft begins.

        Args:
            max_slots: as in `Drafter.extend`.
        """
        if self.drafter is None or self.pending_bound < 2:
            return  # the newest only
        newest = (self.num_pending - 1).clamp(min=0)
        if not self.drafter.reads_last_only:
            width = self.pending_bound
            features = None if self.pending_features is None else self.pending_features[:, :width]
            self.drafter.extend(self.draft, features, self.pending_ids[:, :width], newest, max_slots=max_slots)
        every_row = torch.arange(len(newest), device=newest.device)
        for waiting in (self.pending_ids, self.pending_features):
            if waiting is not None:
                waiting[:, 0] = waiting[every_row, newest]
        self.num_pending.clamp_(max=1)
        self.pending_bound = 1

    def retire(self, places: Sequence[int]) -> None:
        """Finished rows stay and no longer grow. They forget their tokens, so that no view has to reach them."""
        for place in set(places) - self._retired:
            for tensor in (self.active, self.cache.lengths, self.num_pending, self.limits):
                tensor[place].zero_()
            self.num_tokens[place].fill_(1)  # beyond the limit, so that no processor is asked about it
            self._retired.add(place)

    def compact(self, ended: Sequence[int]) -> list[int]:
        """Rows leave, and the last rows move into their places; returns which row comes to each place."""
        places = close_ranks([place not in ended for place in range(len(self.rows))])
        self.rows = [self.rows[place] for place in places]
        self.cache.keep_rows(places)
        for buffer in self._buffers.values():
            first_rows(buffer, places)
        self._show(len(places))
        if self.drafter is not None and places:
            if self.num_pending.device.type == "cpu":  # elsewhere the host would wait for it
                self.pending_bound = int(self.num_pending.max())
            self.drafter.keep_rows(self.draft, places)
            self._share_cache()
        return places

    def add(self, other: DecodeState) -> None:
        """The rows of another state, of the same capacity, join after the present ones; their drafter has read all
        but their pending tokens. The states share nothing then."""
        first, longest = len(self.rows), max(row.num_committed for row in other.rows)
        self.rows += other.rows
        if not first:
            self.cache.reset(0)
            self._retired.clear()
        self.cache.add_rows(other.cache, max_length=longest)
        if other.pending_features is not None:
            self.hold_features(other.pending_features)
        self._show(len(self.rows))
        for name in other._buffers:
            getattr(self, name)[first:] = getattr(other, name)
        self.pending_bound = max(self.pending_bound if first else 0, other.pending_bound)
        if self.drafter is None:
            return
        if first:
            self.drafter.add_rows(self.draft, other.draft, max_slots=longest)
            self._share_cache()
        else:
            lengths = other.cache.lengths - other.num_pending
            self.start_drafter()
            self.drafter.copy_rows(
                self.draft, other.draft, self._every_place[: len(lengths)], lengths, max_slots=longest
            )

    def copy_rows(self, cache: KVCache, draft: Any, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Now the first lengths[b] tokens of row rows[b] of a cache, this one or another, stand in place b of the
        cache, and of the drafter's state if there is one.

        Args:
            draft: the drafter's state for `cache`.
        """
        chosen, counts = (torch.tensor(numbers, device=self.cache.lengths.device) for numbers in (rows, lengths))
        self.cache.copy_rows(cache, chosen, counts, max_length=max(lengths))
        if self.drafter is None:
            return
        if draft is self._own_draft and self.drafter.has_static_state:
            self.draft = draft
        else:
            self.start_drafter()
        self.drafter.copy_rows(self.draft, draft, chosen, counts, max_slots=max(lengths))
        self._share_cache()


def close_ranks(stays: Sequence[bool]) -> list[int]:
    """Which row comes to each place when some rows leave and the last ones move into their places.

    >>> close_ranks([True, False, True, False, True])
    [0, 4, 2]
    """
    num_left = sum(stays)
    last = [place for place in range(num_left, len(stays)) if stays[place]]
    return [place if stays[place] else last.pop() for place in range(num_left)]
