"""JoinedSampler: the samplers of several calls, each with a row of its own in one batch.

A row's token depends only on the row's scores and its own sampler, so that greedy and sampled rows of any settings
share a pass. Rows whose processors are equal are processed at once.

Legend: B batch, W frontier nodes of one level, R = B W, C candidate columns, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.drafters.sampling import GREEDY_TEMPERATURE
from draftsmith.inference.request.token_history import TokenHistory


class JoinedSampler(Sampler):
    """One sampler per row. Acceptance rules must be exact: drafts are not drawn at random.

    Args:
        samplers: each of a call with one row.
        texts: of all rows; their `rows` are 0, because each row is alone in its call.
    """

    def __init__(self, samplers: Sequence[Sampler], texts: TokenHistory) -> None:
        processors = [processor for sampler in samplers for processor in sampler.processors]
        no_seed = torch.zeros_like(texts.lengths[:1])
        seeds = [no_seed if one.row_seeds is None or not one.do_sample else one.row_seeds for one in samplers]
        is_sampled = [one.do_sample for one in samplers]
        super().__init__(processors, do_sample=any(is_sampled), row_seeds=torch.cat(seeds))
        assert self.row_seeds is not None
        self.samplers = tuple(samplers)
        if any(one.texts is not None for one in samplers):
            self.texts = texts
        self._sampled = [row for row, is_random in enumerate(is_sampled) if is_random]
        self._of_sampled_rows = Sampler(do_sample=True, row_seeds=self.row_seeds[self._sampled])
        groups: dict[Any, list[int]] = {}
        for row, one in enumerate(samplers):
            groups.setdefault((one.do_sample, _settings_of(one)), []).append(row)
        self._groups = list(groups.values())

    def select(self, rows: Sequence[int], batch_size: int, texts: TokenHistory) -> JoinedSampler:
        return JoinedSampler([self.samplers[row] for row in rows], texts)

    def are_ends(self, tokens: Tensor) -> Tensor:
        return torch.cat([one.are_ends(tokens[row : row + 1]) for row, one in enumerate(self.samplers)])

    def draw_noise(self, root_positions: Tensor, num_depths: int, vocab_size: int) -> Tensor | None:
        """As `Sampler.draw_noise`; 0 in greedy rows."""
        if not self.do_sample or len(self._sampled) == len(self.samplers):
            return super().draw_noise(root_positions, num_depths, vocab_size)
        noise = torch.zeros(len(self.samplers), num_depths, vocab_size, device=root_positions.device)
        drawn = self._of_sampled_rows.draw_noise(root_positions[self._sampled], num_depths, vocab_size)
        assert drawn is not None
        noise[self._sampled] = drawn
        return noise

    def warp_draft(self, logits: Tensor) -> Tensor:
        """As `Sampler.warp_draft`. The scores of greedy rows get the temperature that they have in greedy batches."""
        by_row = logits.view(len(self.samplers), -1, logits.shape[-1])
        warped = torch.empty_like(by_row)
        for rows in self._groups:
            own = self.samplers[rows[0]]
            part = by_row[rows].flatten(0, 1)
            part = own.warp_draft(part) if own.do_sample else part / GREEDY_TEMPERATURE
            warped[rows] = part.view(len(rows), *by_row.shape[1:])
        return warped.view_as(logits)

    def process(self, scores: Tensor, texts: TokenHistory | None = None, is_walking: Tensor | None = None) -> Tensor:
        """As `Sampler.process`, on one node of each row: scores [B, V]."""
        if not self.processors:
            return scores
        scores = scores.to(torch.float32, copy=True)
        for rows in self._groups:
            own = self.samplers[rows[0]]
            if not own.processors:
                continue
            if len(rows) > 1:  # equal processors that read no text
                scores[rows] = own.process(scores[rows])
                continue
            here = slice(rows[0], rows[0] + 1)
            text = None if texts is None else _slice_texts(texts, here)
            scores[here] = own.process(scores[here], text, None if is_walking is None else is_walking[here])
        return scores


def _slice_texts(texts: TokenHistory, rows: slice) -> TokenHistory:
    """Some of the texts, in the same memory."""
    own = {name: getattr(texts, name)[rows] for name in ("token_ids", "lengths", "limits", "rows")}
    return replace(texts, **own)


def _settings_of(sampler: Sampler) -> Any:
    """Equal for samplers whose processors do the same; a sampler that reads the text equals only itself."""
    if sampler.texts is not None:
        return id(sampler)
    settings = [(type(one), sorted(vars(one).items())) for one in sampler.processors]
    if any(isinstance(value, Tensor) for _, items in settings for _, value in items):
        return id(sampler)
    return repr(settings)
