"""Batch: the rows of a call that are in the cache now. Finished rows leave it, or stay and no longer grow.

Legend: B rows in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.cache.tree_cache import TreeCache
from draftsmith.inference.execution.drafting import Drafting
from draftsmith.inference.prompts import HeldTexts
from draftsmith.inference.request.request import Request


class Batch:
    """The rows in the cache, with their sampler and drafting.

    Attributes:
        rows: which of the call's rows each of them is.
        active: [B] int64, 0 for finished rows that are still here; None if there are none.
    """

    def __init__(self, request: Request, sampler: Sampler, cache: TreeCache, drafting: Drafting) -> None:
        self.request, self.sampler, self.cache, self.drafting = request, sampler, cache, drafting
        self.rows = list(range(request.batch_size))
        self.active: Tensor | None = None
        self._retired: set[int] = set()  # places of the finished rows that are still here
        # Per row of the call: slots that the drafter holds, and whether its keys and values were written over.
        self._num_taken = [request.num_committed(row) for row in self.rows]
        self._is_damaged = [request.media is not None] * request.batch_size  # placeholders do not tell images apart

    def settle(self) -> None:
        """After an emission: finished rows leave or are masked, and the cache learns the true lengths."""
        request, cache = self.request, self.cache
        cache.length_bound = max(request.num_committed(row) for row in self.rows)
        if self.drafting.step.rows_may_leave:
            self._drop_finished()
            # Tight bounds keep the attention's view tight.
            cache.length_bound = max(request.num_committed(row) for row in self.rows)
        cache.length_floor = min(request.num_committed(row) for row in request.unfinished)
        ended = [place for place, row in enumerate(self.rows) if row not in request.unfinished]
        for place in set(ended) - self._retired:
            if self.active is None:
                self.active = torch.ones_like(cache.lengths)
            self.active[place].zero_()
            cache.lengths[place].zero_()  # finished rows forget their tokens, so that no view has to reach them
            self._retired.add(place)
            self._is_damaged[self.rows[place]] = True
            self.drafting.retire(self.active)
        if (texts := self.sampler.texts) is not None:
            if self.active is not None:
                texts.lengths *= self.active
            longest = max(request.num_shown(row) for row in request.unfinished)
            texts.open_view(longest + self.drafting.step.num_depths)

    def _drop_finished(self) -> None:
        """The last rows take the places of finished ones, in the cache and everywhere else."""
        places = close_ranks([row in self.request.unfinished for row in self.rows])
        if len(places) == len(self.rows):
            return
        for place in set(range(len(self.rows))) - set(places):
            self._is_damaged[self.rows[place]] = True
        self.sampler = self.sampler.select(places, len(self.rows))
        self.rows = [self.rows[place] for place in places]
        self.cache.keep_rows(places)
        self.drafting.keep_rows(places, self.cache)

    def note_drafted(self) -> None:
        """After a draft: the drafter may hold every certain slot now."""
        if self.drafting.has_taken_all:
            for row in self.request.unfinished:
                self._num_taken[row] = self.request.num_committed(row)

    def held_texts(self) -> HeldTexts:
        """The texts that the next call may find in the cache."""
        return HeldTexts(
            self.cache,
            self.drafting.state,
            [[] if self._is_damaged[row] else self.request.text(row) for row in self.rows],
            None if self.drafting.step.drafter is None else [self._num_taken[row] for row in self.rows],
        )


def close_ranks(stays: Sequence[bool]) -> list[int]:
    """Which row comes to each place when some rows leave and the last ones move into their places.

    >>> close_ranks([True, False, True, False, True])
    [0, 4, 2]
    """
    num_left = sum(stays)
    last = [place for place in range(num_left, len(stays)) if stays[place]]
    return [place if stays[place] else last.pop() for place in range(num_left)]
