"""Sampler: how the target picks a token from its logits.

Legend: B batch, R rows of scores, C candidate columns, V target vocabulary, E tokens that end a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache.row_selection import pick_rows
from draftsmith.inference.drafters.sampling import GREEDY_TEMPERATURE
from draftsmith.inference.noise import gumbel_noise
from draftsmith.inference.request.processors import COLUMN_FREE, NO_TOKEN, PREFIX_FREE
from draftsmith.inference.request.request import Request
from draftsmith.inference.request.row_processors import processors_of_row
from draftsmith.inference.request.text_processors import TextProcessor, read_processors
from draftsmith.inference.request.token_history import TokenHistory
from draftsmith.inference.trees.token_tree import TokenTree


def pick_token(scores: Tensor, noise: Tensor | None = None) -> Tensor:
    """The token with the largest score [..., V] (plus noise), or `NO_TOKEN`: [...] long."""
    # torch takes NaN for the largest of all values.
    best, token = (scores if noise is None else scores + noise).max(-1)
    return torch.where(best > float("-inf"), token, NO_TOKEN)


@dataclass(eq=False)
class Settings:
    """How the rows of one call pick their tokens.

    Attributes:
        processors: transformers' logits processors, or what `read_processors` makes of them, in order.
        do_sample: sample from the processed distribution; otherwise take its argmax.
        end_ids: tokens that end a row. Lazy processors are not called after them.
        num_rows: of the call.
        reads_texts: whether a processor does.
        is_lazy: whether a processor may keep a state.
        warpers: the processors that draft scores get, too.
    """

    processors: tuple[Any, ...]
    do_sample: bool
    end_ids: frozenset[int]
    num_rows: int
    _of_rows: dict[int, list[Any]] = field(default_factory=dict)  # with copies of the lazy processors

    def __post_init__(self) -> None:
        self.reads_texts = any(type(one) not in PREFIX_FREE for one in self.processors)
        self.is_lazy = any(map(_is_lazy, self.processors))
        self.warpers = tuple(one for one in self.processors if self.do_sample and type(one) in COLUMN_FREE)

    @cached_property
    def key(self) -> Any:
        """Equal for settings that do the same with the same scores and texts."""
        if self.is_lazy:
            return id(self)
        return self.do_sample, tuple((type(one), _freeze(sorted(vars(one).items()))) for one in self.processors)

    def warp(self, logits: Tensor) -> Tensor:
        """As `Sampler.warp_draft`, of rows with these settings."""
        for processor in self.warpers:
            logits = processor(None, logits)
        return logits

    def process(self, scores: Tensor, texts: TokenHistory | None, is_walking: Tensor | None) -> Tensor:
        """As `Sampler.process`, of rows with these settings. It may write into the scores."""
        numbered: list[list[int]] = []
        if self.is_lazy:
            assert texts is not None
            assert is_walking is not None
            numbered = torch.stack([texts.lengths * is_walking, texts.indices], dim=1).tolist()
        for place, processor in enumerate(self.processors):
            if not _is_lazy(processor):
                scores = processor(texts, scores)
                continue
            assert texts is not None
            for row, (length, index) in enumerate(numbered):
                if length:  # in a copy, since a processor may keep it
                    text = texts.token_ids[row : row + 1, :length].clone()
                    scores[row : row + 1] = self._of_row(index)[place](text, scores[row : row + 1].clone())
        return scores

    def _of_row(self, index: int) -> Sequence[Any]:
        """The processors, with the own copies of lazy ones that a row of the call has."""
        if self.num_rows == 1:
            return self.processors
        if index not in self._of_rows:
            copies = iter(processors_of_row([one for one in self.processors if _is_lazy(one)], index, self.num_rows))
            self._of_rows[index] = [next(copies) if _is_lazy(one) else one for one in self.processors]
        return self._of_rows[index]


class Sampler:
    """How the target picks tokens: each row's logits processors, then argmax, with keyed Gumbel noise in sampled rows.

    A row's token depends only on its own scores, seed and settings. So rows of several calls share a batch (`join`),
    and those whose processors are equal are processed at once.

    Processors whose exact type is in PREFIX_FREE, and `TextProcessor`s, are functions of tensors that run on many rows
    at once. Any other may keep a state (a grammar), so it runs as in plain decoding: once per emitted token, in order,
    on each row by itself, after one host read of which rows walk.

    Attributes:
        groups: settings, and the numbers of the rows [G] long that have them; None = all rows.
        has_processors: whether any row has some.
        do_sample: whether any row is sampled.
        row_seeds: [B] long; None if no row is sampled.
        keeps_scores: rules return the scores (`Acceptance.scores`).
        texts: the rows' texts; None if no processor reads any.
        is_lazy: whether any processor may keep a state.
    """

    def __init__(
        self,
        processors: Iterable[Callable[[Any, Any], Any]] = (),
        *,
        do_sample: bool = False,
        row_seeds: Tensor | None = None,
        eos_token_ids: Iterable[int] = (),
        keeps_scores: bool = False,
        texts: TokenHistory | None = None,
    ) -> None:
        """The sampler of one call.

        Args:
            processors, do_sample, eos_token_ids: of all rows, as in `Settings`.
            row_seeds: [B] long from `noise.row_seeds`; required to sample.
            texts: the rows' texts; may be None if all processors are prefix-free.
        """
        assert row_seeds is not None or not do_sample, "sampling needs seeds"
        num_rows = 1 if texts is None else len(texts.indices)
        self.keeps_scores = keeps_scores
        self._set_rows([Settings(tuple(processors), do_sample, frozenset(eos_token_ids), num_rows)], row_seeds, texts)

    @classmethod
    def of_request(cls, request: Request, row_seeds: Tensor | None, texts: TokenHistory, *, vocab_size: int) -> Sampler:
        """The sampler of a call.

        Args:
            row_seeds: read only if the call samples.
            texts: the call's rows.
        """
        return cls(
            read_processors(request.processors, texts, vocab_size),
            do_sample=request.do_sample,
            row_seeds=row_seeds if request.do_sample else None,
            eos_token_ids=request.eos_token_ids,
            keeps_scores=request.keeps_scores,
            texts=texts,
        )

    @classmethod
    def join(cls, samplers: Sequence[Sampler], texts: TokenHistory) -> Sampler:
        """The sampler of the rows of several samplers, one after the other. Where some rows are greedy, the acceptance
        rule must be exact: they get no noise.

        Args:
            samplers: of calls with one row, or joined ones.
            texts: of all rows.
        """
        joined = cls()
        settings = [one for sampler in samplers for one in sampler._settings]
        none = torch.zeros_like(texts.lengths)
        seeds = [none[: len(one._settings)] if one.row_seeds is None else one.row_seeds for one in samplers]
        joined._set_rows(settings, torch.cat(seeds), texts)
        return joined

    def select(self, rows: Sequence[int], texts: TokenHistory) -> Sampler:
        """This sampler for some of its rows, which `texts` holds; their processors keep their states."""
        chosen = copy.copy(self)
        settings = self._settings if len(self._settings) == 1 else [self._settings[row] for row in rows]
        chosen._set_rows(settings, None if self.row_seeds is None else pick_rows(self.row_seeds, rows), texts)
        return chosen

    def _set_rows(self, settings: list[Settings], row_seeds: Tensor | None, texts: TokenHistory | None) -> None:
        """Of each row, or one of all rows."""
        self._settings, self.row_seeds = settings, row_seeds
        self.do_sample, self.is_lazy = any(one.do_sample for one in settings), any(one.is_lazy for one in settings)
        self.has_processors = any(one.processors for one in settings)
        self.texts = texts if any(one.reads_texts for one in settings) else None
        by_key: dict[Any, list[int]] = {}
        for row, one in enumerate(settings if len(settings) > 1 else ()):
            by_key.setdefault(one.key, []).append(row)
        self.groups: list[tuple[Settings, Tensor | None]] = [(settings[0], None)]
        self._sampled: Tensor | None = None  # the sampled rows among greedy ones
        if len(by_key) > 1:
            assert row_seeds is not None, "joined rows have seeds"
            self.groups = [(settings[rows[0]], torch.tensor(rows, device=row_seeds.device)) for rows in by_key.values()]
            sampled = [row for row, one in enumerate(settings) if one.do_sample]
            if 0 < len(sampled) < len(settings):
                self._sampled = torch.tensor(sampled, device=row_seeds.device)
        if self.is_lazy and self.texts is not None:
            most = max(len(one.end_ids) for one in settings)
            ends = [[*one.end_ids, *[NO_TOKEN - 1] * (most - len(one.end_ids))] for one in settings]
            self._end_ids = torch.tensor(ends, dtype=torch.long, device=self.texts.lengths.device)  # [B or 1, E]

    @property
    def lazy_names(self) -> list[str]:
        """The types of the processors that may keep a state."""
        return sorted({type(one).__name__ for s, _ in self.groups for one in s.processors if _is_lazy(one)})

    def are_ends(self, tokens: Tensor) -> Tensor:
        """[B] bool, whether each row's token of `tokens` [B] ends the row. Of a lazy sampler."""
        return (tokens[:, None] == self._end_ids).any(1)

    def draw_noise(self, root_positions: Tensor, num_depths: int, vocab_size: int) -> Tensor | None:
        """Noise of a step's draws: [B, num_depths, V] float32, 0 in greedy rows; None when all are greedy.

        Entry d belongs to the token drawn at nodes of depth d, which stands at position root + d + 1.
        """
        if not self.do_sample or self.row_seeds is None:
            return None
        steps = torch.arange(1, num_depths + 1, device=root_positions.device)
        seeds, positions, rows = self.row_seeds, root_positions[:, None] + steps, self._sampled
        if rows is None:
            return gumbel_noise(seeds, positions, vocab_size)
        drawn = gumbel_noise(seeds[rows], positions[rows], vocab_size)
        return drawn.new_zeros(len(seeds), num_depths, vocab_size).index_copy_(0, rows, drawn)

    def warp_draft(self, logits: Tensor) -> Tensor:
        """Draft scores [R, C], adjusted by the COLUMN_FREE processors (arXiv 2211.17192, section 2.2). Those of greedy
        rows among sampled ones get the temperature that they have in greedy batches.

        Tokens that other processors forbid may be drafted, and are never accepted. No rule needs q to be processed as p
        is; drafts must come from the q that the rule is told.
        """
        if len(self.groups) == 1:
            return self.groups[0][0].warp(logits)
        warped = torch.empty_like(logits)
        for settings, rows in self.groups:
            here = self._expand(rows, len(logits))
            own = logits.index_select(0, here)
            warped.index_copy_(0, here, settings.warp(own) if settings.do_sample else own / GREEDY_TEMPERATURE)
        return warped

    def process(self, scores: Tensor, texts: TokenHistory | None = None, is_walking: Tensor | None = None) -> Tensor:
        """All processors in order on scores [R, V] in float32; R = B, or a multiple: the nodes of the rows' trees.

        Args:
            texts: that the scores follow, for processors that read them.
            is_walking: [B] bool, the rows for which lazy processors are called; there R = B.
        """
        if not self.has_processors:
            return scores
        scores = scores.to(torch.float32, copy=True)
        if len(self.groups) == 1:
            return self.groups[0][0].process(scores, texts, is_walking)
        for settings, rows in self.groups:
            if settings.processors:
                here = self._expand(rows, len(scores))
                own = texts.pick(here) if texts is not None and settings.reads_texts else None
                walking = is_walking[here] if is_walking is not None and settings.is_lazy else None
                scores.index_copy_(0, here, settings.process(scores.index_select(0, here), own, walking))
        return scores

    def process_nodes(self, tree: TokenTree, logits: Tensor) -> Tensor:
        """All processors on the scores [B, N, V] at every node of the trees. None may be lazy."""
        texts = None if self.texts is None else self.texts.at_nodes(tree.token_ids, tree.depths, tree.ancestors)
        return self.process(logits.flatten(0, 1), texts).view(logits.shape)

    def _expand(self, rows: Tensor | None, num_scores: int) -> Tensor:
        """The scores that belong to some rows, where each row has equally many."""
        assert rows is not None
        each = num_scores // len(self._settings)
        return rows if each == 1 else (rows[:, None] * each + torch.arange(each, device=rows.device)).flatten()


def _is_lazy(processor: Any) -> bool:
    return type(processor) not in PREFIX_FREE and not isinstance(processor, TextProcessor)


def _freeze(value: Any) -> Any:
    """Equal for equal values, at any depth of tuples and lists."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.cpu().numpy().tobytes()
    return tuple(map(_freeze, value)) if isinstance(value, (tuple, list)) else repr(value)
