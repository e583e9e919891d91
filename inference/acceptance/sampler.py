"""Sampler: how the target picks a token from its logits.

Legend: B batch, R rows of scores, C candidate columns, V target vocabulary, L length of a row's text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache.kv_cache import pick_rows
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


class Sampler:
    """How the target picks a token: its logits processors, then argmax, with keyed Gumbel noise when sampling.

    Processors whose exact type is in PREFIX_FREE, and `TextProcessor`s, are functions of tensors that run on all rows
    at once. Any other may keep a state (a grammar), so it runs as in plain decoding: once per emitted token, in order,
    on each row by itself, after one host read of which rows walk.

    Attributes:
        lazy_names: the types of the other processors.
        is_lazy: there are any.
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
        texts: TokenHistory | None = None,
    ) -> None:
        """
        Args:
            processors: transformers' logits processors, or what `read_processors` makes of them, in order.
            do_sample: sample from the processed distribution; otherwise take its argmax.
            row_seeds: [B] long from `noise.row_seeds`; required to sample.
            eos_token_ids: tokens that end a row. Lazy processors are not called after them.
            keeps_scores: rules return the scores (`Acceptance.scores`).
            texts: the rows' texts; None if all processors are prefix-free.
        """
        assert row_seeds is not None or not do_sample, "sampling needs seeds"
        self.processors = tuple(processors)
        self.do_sample = do_sample
        self.row_seeds = row_seeds
        self.eos_token_ids = frozenset(eos_token_ids)
        self.keeps_scores = keeps_scores
        self.rows: tuple[int, ...] | None = None
        self.num_rows = 0
        self.texts = texts
        self.lazy_names = sorted({type(one).__name__ for one in self.processors if _is_lazy(one)})
        self.is_lazy = bool(self.lazy_names)
        self._row_processors: dict[int, list[Any]] = {}  # copies of the lazy processors
        self._draft_warpers = tuple(
            processor for processor in self.processors if do_sample and type(processor) in COLUMN_FREE
        )

    @classmethod
    def of_request(cls, request: Request, row_seeds: Tensor | None, texts: TokenHistory, *, vocab_size: int) -> Sampler:
        """The sampler of a call.

        Args:
            row_seeds: read only if the call samples.
            texts: the call's rows.
        """
        processors = list(request.processors)
        reads_texts = any(type(processor) not in PREFIX_FREE for processor in processors)
        return cls(
            read_processors(processors, texts, vocab_size) if reads_texts else processors,
            do_sample=request.do_sample,
            row_seeds=row_seeds if request.do_sample else None,
            eos_token_ids=request.eos_token_ids,
            keeps_scores=request.keeps_scores,
            texts=texts if reads_texts else None,
        )

    def select(self, rows: Sequence[int], batch_size: int, texts: TokenHistory) -> Sampler:
        """This sampler for some of its `batch_size` rows, which `texts` holds; their processors keep their states."""
        chosen = copy.copy(self)
        if self.rows is None:
            chosen.rows, chosen.num_rows = tuple(rows), batch_size
        else:
            chosen.rows = tuple(self.rows[row] for row in rows)
        if self.row_seeds is not None:
            chosen.row_seeds = pick_rows(self.row_seeds, rows)
        if self.texts is not None:
            chosen.texts = texts
        return chosen

    def are_ends(self, tokens: Tensor) -> Tensor:
        """[B] bool, whether each row's token of `tokens` [B] ends the row."""
        if not self.eos_token_ids:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return torch.isin(tokens, torch.tensor(sorted(self.eos_token_ids), device=tokens.device))

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
        for processor in self._draft_warpers:
            logits = processor(None, logits)
        return logits

    def process(self, scores: Tensor, texts: TokenHistory | None = None, is_walking: Tensor | None = None) -> Tensor:
        """All processors in order on scores [R, V] in float32.

        Args:
            texts: that the scores follow, for processors that read them.
            is_walking: [B] bool, the rows for which lazy processors are called; there R = B.
        """
        if not self.processors:
            return scores
        scores = scores.to(torch.float32, copy=True)
        lengths: list[int] = []
        if self.is_lazy:
            assert texts is not None
            assert is_walking is not None
            lengths = (texts.lengths * is_walking).tolist()
        for place, processor in enumerate(self.processors):
            if not _is_lazy(processor):
                scores = processor(texts, scores)
                continue
            assert texts is not None
            for row, length in enumerate(lengths):
                if length:  # in a copy, since a processor may keep it
                    text = texts.token_ids[row : row + 1, :length].clone()
                    own = self._of_row(row, len(lengths))[place]
                    scores[row : row + 1] = own(text, scores[row : row + 1].clone())
        return scores

    def process_nodes(self, tree: TokenTree, logits: Tensor) -> Tensor:
        """All processors on the scores [B, N, V] at every node of the trees. None may be lazy."""
        texts = None if self.texts is None else self.texts.at_nodes(tree.token_ids, tree.depths, tree.ancestors)
        return self.process(logits.flatten(0, 1), texts).view(logits.shape)

    def _of_row(self, row: int, batch_size: int) -> Sequence[Any]:
        """The processors, with a row's own copies of lazy ones."""
        if batch_size == 1 and self.rows is None:
            return self.processors
        number, num_rows = (row, batch_size) if self.rows is None else (self.rows[row], self.num_rows)
        if number not in self._row_processors:
            copies = iter(processors_of_row([one for one in self.processors if _is_lazy(one)], number, num_rows))
            self._row_processors[number] = [next(copies) if _is_lazy(one) else one for one in self.processors]
        return self._row_processors[number]


def _is_lazy(processor: Any) -> bool:
    return type(processor) not in PREFIX_FREE and not isinstance(processor, TextProcessor)
