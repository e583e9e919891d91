"""Sampler: how the target picks a token from its logits.

Legend: B batch, R rows of scores, C candidate columns, V target vocabulary, L length of a row's text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from inference.noise import gumbel_noise
from inference.request.processors import COLUMN_FREE, KEEPS_NOTHING, NO_TOKEN, PREFIX_FREE
from inference.request.row_processors import processors_of_row


def pick_token(scores: Tensor, noise: Tensor | None = None) -> Tensor:
    """The token with the largest score [..., V] (plus noise), or `NO_TOKEN`: [...] long."""
    # torch takes NaN for the largest of all values.
    best, token = (scores if noise is None else scores + noise).max(-1)
    return torch.where(best > float("-inf"), token, NO_TOKEN)


class Sampler:
    """How the target picks a token: its logits processors, then argmax, with keyed Gumbel noise when sampling.

    Processors whose exact type is in PREFIX_FREE look at one row of scores only, so they may run on all rows at once.
    Those in KEEPS_NOTHING also read the row's text. Any other may keep a state (a grammar), so it runs as in plain
    decoding: once per emitted token, in order, on each row by itself.

    Attributes:
        is_prefix_free: all processors are in PREFIX_FREE.
        keeps_nothing: all are in PREFIX_FREE or KEEPS_NOTHING.
        reading_names: the types that are not in PREFIX_FREE.
        rows: the numbers of this sampler's rows in a batch of `num_rows` (`select`); None = all.
    """

    def __init__(
        self,
        processors: Iterable[Callable[[Any, Any], Any]] = (),
        *,
        do_sample: bool = False,
        row_seeds: Tensor | None = None,
        eos_token_ids: Iterable[int] = (),
        keeps_scores: bool = False,
    ) -> None:
        """
        Args:
            processors: transformers logits processors (a LogitsProcessorList), in order.
            do_sample: sample from the processed distribution; otherwise take its argmax.
            row_seeds: [B] long from `noise.row_seeds`; required to sample.
            eos_token_ids: tokens that end a row. Processors that are not prefix-free are not called after them.
            keeps_scores: rules return the scores (`Acceptance.scores`).
        """
        assert row_seeds is not None or not do_sample, "sampling needs seeds"
        self.processors = tuple(processors)
        self.do_sample = do_sample
        self.row_seeds = row_seeds
        self.eos_token_ids = frozenset(eos_token_ids)
        self.keeps_scores = keeps_scores
        self.rows: tuple[int, ...] | None = None
        self.num_rows = 0
        types = {type(processor) for processor in self.processors}
        self.is_prefix_free = types <= PREFIX_FREE
        # A repetition penalty may hold a setting per row, as a tensor.
        has_rows = any(isinstance(getattr(p, "prompt_ignore_length", None), Tensor) for p in self.processors)
        self.keeps_nothing = types <= PREFIX_FREE | KEEPS_NOTHING and not has_rows
        self.reading_names = sorted(kind.__name__ for kind in types - PREFIX_FREE)
        self._row_samplers: dict[int, Sampler] = {}
        self._draft_warpers = tuple(
            processor for processor in self.processors if do_sample and type(processor) in COLUMN_FREE
        )

    def select(self, rows: Sequence[int], batch_size: int) -> Sampler:
        """This sampler for some of its `batch_size` rows; their processors keep their states."""
        chosen = copy.copy(self)
        if self.rows is None:
            chosen.rows, chosen.num_rows = tuple(rows), batch_size
        else:
            chosen.rows = tuple(self.rows[row] for row in rows)
        if self.row_seeds is not None:
            chosen.row_seeds = self.row_seeds[list(rows)]
        return chosen

    def for_row(self, row: int, batch_size: int) -> Sampler:
        """This sampler for one row of a batch, with copies of the processors that read the text (`row_processors`)."""
        if batch_size == 1 and self.rows is None:
            return self
        number, num_rows = (row, batch_size) if self.rows is None else (self.rows[row], self.num_rows)
        if number not in self._row_samplers:
            reading = [processor for processor in self.processors if type(processor) not in PREFIX_FREE]
            own = iter(processors_of_row(reading, number, num_rows))
            processors = [one if type(one) in PREFIX_FREE else next(own) for one in self.processors]
            self._row_samplers[number] = Sampler(processors, eos_token_ids=self.eos_token_ids)
        return self._row_samplers[number]

    def draw_noise(self, root_positions: Tensor, num_depths: int, vocab_size: int) -> Tensor | None:
        """Noise of a step's draws: [B, num_depths, V] float32, or None when greedy.

        Entry d belongs to the token drawn at nodes of depth d, which stands at position root + d + 1.
        """
        if not self.do_sample or self.row_seeds is None:
            return None
        steps = torch.arange(1, num_depths + 1, device=root_positions.device)
        return gumbel_noise(self.row_seeds, root_positions[:, None] + steps, vocab_size)

    def warp_draft(self, logits: Tensor) -> Tensor:
        """Draft scores [R, C], adjusted by the COLUMN_FREE processors (arXiv 2211.17192, section 2.2).

        Tokens that other processors forbid may be drafted, and are never accepted. No rule needs q to be processed as p
        is; drafts must come from the q that the rule is told.
        """
        return self._apply(self._draft_warpers, None, logits)

    def process(self, logits: Tensor, prefix_ids: Tensor | None = None) -> Tensor:
        """All processors in order on scores [R, V] in float32; `prefix_ids` [R, L] for those that read it."""
        if not self.processors:
            return logits
        return self._apply(self.processors, prefix_ids, logits.to(torch.float32, copy=True))

    @staticmethod
    def _apply(processors: Sequence[Callable[[Any, Any], Any]], prefix_ids: Tensor | None, scores: Tensor) -> Tensor:
        if prefix_ids is None:
            prefix_ids = torch.zeros((scores.shape[0], 1), dtype=torch.long, device=scores.device)
        for processor in processors:
            scores = processor(prefix_ids, scores)
        return scores
