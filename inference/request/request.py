"""The rows of one call: their prompts, the tokens emitted so far, and when each row ends.

Legend: B batch, L padded prompt length as given.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, LogitsProcessorList, MaxLengthCriteria

from draftsmith.inference.cache.source import Source
from draftsmith.inference.request.prompt_checks import check_token_ids, count_tokens, pad_left
from draftsmith.inference.request.row import Row
from draftsmith.inference.request.stopping import Stopping
from draftsmith.inference.targets.multimodal import Media
from draftsmith.inference.targets.target import Target

logger = logging.getLogger(__name__)


class Request:
    """What one call of transformers' generate asks for.

    Attributes:
        rows: its texts.
        processors: transformers' logits processors, in order.
        eos_token_ids: tokens that end the rows (`end_at`).
        source: of an encoder-decoder target; the prompts are then the first tokens of its decoder.
        media: the prompts as a model reads them together with images, video or audio; None for text.
        given_ids: [B, L], the prompts with the caller's padding, as `sequences` returns them.
        keeps_scores, keeps_logits: whether the caller asked for them (and for a dictionary to hold them).
    """

    def __init__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        processors: LogitsProcessorList,
        criteria: Sequence[Any],
        config: GenerationConfig,
        target: Target,
        streamer: Any,
        source: Source | None = None,
    ) -> None:
        if streamer is not None and input_ids.shape[0] > 1:
            raise ValueError(f"a streamer takes a batch of 1, got {input_ids.shape[0]} rows: stream them one by one")
        self.input_ids = self.given_ids = input_ids.to(target.device)
        mask = torch.ones_like(self.input_ids) if attention_mask is None else attention_mask.to(target.device)
        counts = count_tokens(mask, "prompt")
        padded: list[list[int]] = pad_left(self.input_ids, mask)[0].tolist()
        prompts = [row[len(row) - count :] for row, count in zip(padded, counts, strict=True)]
        check_token_ids(prompts, target.num_embeddings, "prompt")
        self.keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        self.keeps_logits = bool(config.return_dict_in_generate and config.output_logits)
        self.processors = processors
        self.do_sample = bool(config.do_sample)
        self.streamer, self.source = streamer, source
        self.media: Media | None = None
        self.eos_token_ids: set[int] = set()
        others: list[Any] = []
        limit: int | None = None  # on input_ids, padding included, as transformers counts
        for criterion in criteria:
            if isinstance(criterion, EosTokenCriteria):
                self.eos_token_ids.update(criterion.eos_token_id.flatten().tolist())
            elif isinstance(criterion, MaxLengthCriteria):
                limit = criterion.max_length if limit is None else min(limit, criterion.max_length)
            else:
                others.append(criterion)
        if limit is None:
            raise ValueError("there is no length limit: pass max_new_tokens or max_length")
        self.pad_token_id = _pad_token_id(config)
        budgets = [limit - self.input_ids.shape[1]] * len(counts)
        if target.max_length is not None:
            budgets = _cut_budgets(budgets, counts, target.max_length, target.length_limit_reason)
        stopping = Stopping(others, padded, max(1, *budgets), target.device) if others else None
        self.rows = [
            Row(
                index,
                padded[index],
                len(padded[index]) - count,
                budget,
                self.eos_token_ids,
                None if stopping is None else partial(stopping.ends, index),
                None if streamer is None else lambda token: streamer.put(torch.tensor([token])),
            )
            for index, (count, budget) in enumerate(zip(counts, budgets, strict=True))
        ]

    def end_at(self, token_ids: Iterable[int]) -> None:
        """Texts end at these tokens, instead of those of the generation config."""
        self.eos_token_ids.clear()
        self.eos_token_ids.update(token_ids)

    def check_plain(self, purpose: str) -> None:
        """Refuses (ValueError) prompts with images, video or audio, and outputs with scores."""
        if self.media is not None:
            raise ValueError(f"{purpose} reads prompts of text only, without images, video or audio: use generate()")
        if self.keeps_scores or self.keeps_logits:
            raise ValueError(
                f"{purpose} gives tokens, not scores: leave output_scores and output_logits out, or use generate()"
            )

    @property
    def batch_size(self) -> int:
        return len(self.rows)

    @property
    def is_finished(self) -> bool:
        return all(row.is_finished for row in self.rows)

    @property
    def num_new_tokens(self) -> int:
        return sum(len(row.new) for row in self.rows)

    @property
    def prompts(self) -> list[list[int]]:
        """The real tokens of each row's prompt."""
        return [row.prompt for row in self.rows]

    @property
    def max_length(self) -> int:
        """The most tokens of any row, prompt without padding included."""
        return max(row.max_padded - row.num_padding for row in self.rows)

    @property
    def max_padded(self) -> int:
        """The most tokens of any row, padding included."""
        return max(row.max_padded for row in self.rows)

    def sequences(self) -> Tensor:
        """[B, L + longest continuation], padded on the right."""
        longest = max(len(row.new) for row in self.rows)
        rows = [row.new + [self.pad_token_id] * (longest - len(row.new)) for row in self.rows]
        new_ids = torch.tensor(rows, dtype=torch.long, device=self.input_ids.device)
        return torch.cat([self.given_ids, new_ids], dim=1)


def _cut_budgets(budgets: list[int], counts: list[int], max_length: int, reason: str) -> list[int]:
    longest = max(counts)
    if longest >= max_length:
        raise ValueError(
            f"the prompt has {longest} tokens; this target reads fewer than {max_length} ({reason}): shorten it"
        )
    cut = [min(budget, max_length - count) for budget, count in zip(budgets, counts, strict=True)]
    if cut != budgets:
        logger.warning(
            "generation will stop at the target's limit of %d tokens (%s), before max_new_tokens", max_length, reason
        )
    return cut


def _pad_token_id(config: GenerationConfig) -> int:
    pad = config.pad_token_id
    if pad is None:
        eos = config.eos_token_id
        pad = eos[0] if isinstance(eos, list) else eos
    return int(pad) if pad is not None else 0
