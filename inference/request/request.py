"""The rows of one call: their prompts, the tokens emitted so far, and when each row ends.

Legend: B batch, L padded prompt length as given.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, LogitsProcessorList, MaxLengthCriteria

from draftsmith.inference.cache.source import Source
from draftsmith.inference.request.processors import NO_TOKEN
from draftsmith.inference.request.prompt_checks import check_token_ids, pad_left
from draftsmith.inference.request.stopping import Stopping
from draftsmith.inference.request.texts import Texts
from draftsmith.inference.targets.multimodal import Media
from draftsmith.inference.targets.target import Target

logger = logging.getLogger(__name__)


class Request:
    """The rows of one call and the tokens emitted so far. Its state is on the host.

    Attributes:
        prompts: the real tokens of each row.
        processors: transformers' logits processors, in order.
        max_length: the most tokens of any row, prompt without padding included.
        unfinished: rows still decoding.
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
        mask = (mask != 0).long()
        counts: list[int] = mask.sum(1).tolist()
        if min(counts) < 1:
            raise ValueError(
                f"row {counts.index(min(counts))} of the prompt is all padding: give each row at least 1 token"
            )
        self._left_padded = pad_left(self.input_ids, mask)[0]
        rows: list[list[int]] = self._left_padded.tolist()
        self.prompts = [row[len(row) - count :] for row, count in zip(rows, counts, strict=True)]
        check_token_ids(self.prompts, target.num_embeddings)
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
        self._prompt_lengths = counts
        self._new: list[list[int]] = [[] for _ in counts]
        self.unfinished = set(range(len(counts)))
        self.budgets = [limit - self.input_ids.shape[1]] * len(counts)
        if target.max_length is not None:
            self._cut_budgets(target.max_length, target.length_limit_reason)
        self._stopping = Stopping(others, rows, max(1, *self.budgets), target.device)
        # A prompt beyond the limit still gets one token, as in transformers.
        self.max_length = max(count + max(budget, 1) for count, budget in zip(counts, self.budgets, strict=True))

    def _cut_budgets(self, max_length: int, reason: str) -> None:
        longest = max(self._prompt_lengths)
        if longest >= max_length:
            raise ValueError(
                f"the prompt has {longest} tokens; this target reads fewer than {max_length} ({reason}): shorten it"
            )
        cut = [min(b, max_length - n) for b, n in zip(self.budgets, self._prompt_lengths, strict=True)]
        if cut != self.budgets:
            logger.warning(
                "generation will stop at the target's limit of %d tokens (%s), before max_new_tokens",
                max_length,
                reason,
            )
        self.budgets = cut

    def refuse_media(self, purpose: str) -> None:
        """Refuses (ValueError) prompts with images, video or audio."""
        if self.media is not None:
            raise ValueError(f"{purpose} reads prompts of text only, without images, video or audio: use generate()")

    @property
    def batch_size(self) -> int:
        return len(self._new)

    @property
    def is_finished(self) -> bool:
        return not self.unfinished

    @property
    def num_new_tokens(self) -> int:
        return sum(map(len, self._new))

    def num_committed(self, row: int) -> int:
        """The number of a row's tokens in the cache: all but the newest, which is the next tree's root."""
        return self._prompt_lengths[row] + len(self._new[row]) - 1

    def text(self, row: int) -> list[int]:
        """The row's tokens so far, prompt without padding included."""
        return self.prompts[row] + self._new[row]

    def shown(self, row: int) -> list[int]:
        """The row's prompt as transformers shows it to a processor: padding on the left."""
        tokens: list[int] = self._left_padded[row].tolist()
        return tokens

    def num_shown(self, row: int) -> int:
        """The number of a row's tokens as transformers shows them to a processor, padding included."""
        return self._left_padded.shape[1] + len(self._new[row])

    @property
    def max_shown(self) -> int:
        """The most tokens, padding included, that any row will have."""
        return self._left_padded.shape[1] + max(1, *self.budgets)

    def new_texts(self, capacity: int) -> Texts:
        """The rows as transformers shows them to a processor, before their first new token."""
        return Texts.of_prompts(self._left_padded, [max(1, budget) for budget in self.budgets], capacity)

    def emit(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        """Adds the tokens that each of these rows emitted, up to the row's end; returns the tokens that were kept.

        Raises:
            ValueError: a row that has not ended has no next token.
        """
        kept: list[list[int]] = [[] for _ in rows]
        for place, row in enumerate(rows):
            for token in tokens[place]:
                if token == NO_TOKEN:
                    raise ValueError(
                        f"no token can follow the {len(self.text(row))} tokens of row {row}: the target's logits are "
                        "NaN (a token drafted in the same pass can cause this), or logits processors forbid every "
                        "token. Look at target(**inputs).logits (half-precision weights that overflow give NaN), and "
                        "at the processors (bad words, prefixes, a grammar)"
                    )
                self._new[row].append(token)
                kept[place].append(token)
                self.budgets[row] -= 1
                if self.streamer is not None:
                    self.streamer.put(torch.tensor([token]))
                if token in self.eos_token_ids or self.budgets[row] <= 0 or self._stopping.ends(row, token):
                    self.unfinished.remove(row)
                    break
        return kept

    def sequences(self) -> Tensor:
        """[B, L + longest continuation], padded on the right."""
        longest = max(map(len, self._new))
        rows = [new + [self.pad_token_id] * (longest - len(new)) for new in self._new]
        new_ids = torch.tensor(rows, dtype=torch.long, device=self.input_ids.device)
        return torch.cat([self.given_ids, new_ids], dim=1)


def _pad_token_id(config: GenerationConfig) -> int:
    pad = config.pad_token_id
    if pad is None:
        eos = config.eos_token_id
        pad = eos[0] if isinstance(eos, list) else eos
    return int(pad) if pad is not None else 0
