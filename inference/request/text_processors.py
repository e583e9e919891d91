"""transformers' logits processors that read the text, as functions of tensors: for all texts at once, on the device.

transformers' classes take texts of one length and some of them read values on the host. These take a `TokenHistory`,
read nothing, and give the same scores bit for bit in float32. A number that depends on the prompt is a tensor, so that
compiled steps need no graph for each of its values.

Legend: R texts, B rows of the call, S places in view, V target vocabulary, X tokens of a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from draftsmith.inference.request.token_history import TokenHistory

NEVER = float("-inf")


class TextProcessor:
    """Adjusts scores [R, V] float32 by the texts that they follow."""

    def __call__(self, texts: TokenHistory, scores: Tensor) -> Tensor:
        raise NotImplementedError


def read_processors(processors: Sequence[Any], texts: TokenHistory, vocab_size: int) -> list[Any]:
    """The processors, with a `TextProcessor` in place of each that has one.

    Args:
        texts: of all rows of the call, at its beginning.

    Raises:
        ValueError: a processor biases tokens that the target does not have.
    """
    readers = [READERS.get(type(processor)) for processor in processors]
    return [
        processor if read is None else read(processor, texts, vocab_size)
        for processor, read in zip(processors, readers, strict=True)
    ]


@dataclass(frozen=True)
class Replacement(TextProcessor):
    """Other scores for some tokens after texts of `low` to `high` - 1 tokens.

    Attributes:
        low, high: [] long. is_replaced: [V] bool. values: [V], the other scores.
    """

    low: Tensor
    high: Tensor
    is_replaced: Tensor
    values: Tensor

    def __call__(self, texts: TokenHistory, scores: Tensor) -> Tensor:
        is_due = (texts.lengths >= self.low) & (texts.lengths < self.high)
        return torch.where(is_due[:, None] & self.is_replaced, self.values, scores)


def _forbid(token_ids: Tensor, low: int, high: int, texts: TokenHistory, vocab_size: int) -> Replacement:
    """No token of these after texts of `low` to `high` - 1 tokens."""
    bounds = torch.tensor([low, high], device=texts.indices.device)
    vocabulary = torch.arange(vocab_size, device=texts.indices.device)
    is_replaced = torch.isin(vocabulary, token_ids.to(texts.indices.device))
    return Replacement(bounds[0], bounds[1], is_replaced, torch.full_like(vocabulary, NEVER, dtype=torch.float32))


def _force(token_ids: Any, length: int, texts: TokenHistory, vocab_size: int) -> Replacement:
    """One token of these after texts of `length` tokens."""
    forbidding = _forbid(torch.arange(vocab_size), length, length + 1, texts, vocab_size)
    forbidding.values[token_ids] = 0.0
    return forbidding


@dataclass(frozen=True)
class RepetitionPenalty(TextProcessor):
    """Attributes:
    ignored: [B] long, tokens at the beginning of each text (its padding) that count for nothing.
    """

    penalty: float
    ignored: Tensor

    @classmethod
    def read(cls, processor: Any, texts: TokenHistory, vocab_size: int) -> RepetitionPenalty:
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, Tensor):  # one of each prompt, whose `num_return_sequences` rows stand together
            ignored = ignored.to(texts.indices.device).repeat_interleave(len(texts.indices) // len(ignored))
        else:
            ignored = torch.full_like(texts.indices, ignored or 0)
        return cls(processor.penalty, ignored)

    def __call__(self, texts: TokenHistory, scores: Tensor) -> Tensor:
        counts = texts.is_text & (texts.places >= self.ignored[texts.indices][:, None])
        columns = _columns_of(texts.tokens, counts, scores)
        padded = torch.nn.functional.pad(scores, (0, 1))
        score = padded.gather(1, columns)
        score = torch.where(score < 0, score * self.penalty, score / self.penalty)
        return padded.scatter(1, columns, score)[:, :-1]


@dataclass(frozen=True)
class OccurrencePenalties(TextProcessor):
    """OpenAI's penalties on tokens that were emitted already, which transformers has not; the prompt does not count.

    Attributes:
        presence: subtracted from the scores of tokens that occur; negative values encourage them.
        frequency: subtracted once for each occurrence.
        begin: [] long, where the emitted tokens begin.
    """

    presence: float
    frequency: float
    begin: Tensor

    def __call__(self, texts: TokenHistory, scores: Tensor) -> Tensor:
        columns = _columns_of(texts.tokens, texts.is_text & (texts.places >= self.begin), scores)
        counts = scores.new_zeros(scores.shape[0], scores.shape[1] + 1)
        counts = counts.scatter_add(1, columns, torch.ones_like(columns, dtype=scores.dtype))[:, :-1]
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True)
class NoRepeatedNgrams(TextProcessor):
    """Worked example, size 3: after "a b c a b" the window "a b c" begins with the text's last two tokens, so "c" is
    banned."""

    size: int

    def __call__(self, texts: TokenHistory, scores: Tensor) -> Tensor:
        tokens, end = texts.tokens, texts.last(self.size)
        matches = texts.is_text & (texts.places >= self.size - 1)  # by the last token of the window
        for back in range(1, self.size):
            matches = matches & (tokens.roll(back, dims=1) == end[:, -back, None])
        is_banned = scores.new_zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)
        is_banned = is_banned.scatter(1, _columns_of(tokens, matches, scores), True)
        return scores.masked_fill(is_banned[:, :-1], NEVER)


@dataclass(frozen=True)
class SequenceBias(TextProcessor):
    """Attributes:
    single: [V], the bias of sequences of one token.
    groups: of the longer ones, by length: all but the last token [X, length - 1], the last one [X], the bias [X].
    """

    single: Tensor
    groups: tuple[tuple[Tensor, Tensor, Tensor], ...]

    @classmethod
    def read(cls, processor: Any, texts: TokenHistory, vocab_size: int) -> SequenceBias:
        device = texts.indices.device
        # After a text that no sequence begins with. transformers checks the tokens here.
        nothing = torch.zeros(1, vocab_size, device=device)
        single = processor(torch.full((1, 1), -1, device=device), nothing)[0]
        by_length: dict[int, list[tuple[Sequence[int], float]]] = {}
        for tokens, bias in processor.sequence_bias.items():
            by_length.setdefault(len(tokens), []).append((tokens, bias))
        groups = []
        for length, members in by_length.items():
            if length > 1:
                token_ids = torch.tensor([tokens for tokens, _ in members], device=device)
                biases = torch.tensor([bias for _, bias in members], dtype=torch.float32, device=device)
                groups.append((token_ids[:, :-1], token_ids[:, -1], biases))
        return cls(single, tuple(groups))

    def __call__(self, texts: TokenHistory, scores: Tensor) -> Tensor:
        bias = self.single.expand_as(scores)
        for starts, ends, biases in self.groups:
            size = starts.shape[1]
            matches = (texts.last(size)[:, None] == starts).all(-1) & (texts.lengths >= size)[:, None]
            bias = bias.index_add(1, ends, torch.where(matches, biases, 0.0))
        return scores + bias


def _columns_of(token_ids: Tensor, counts: Tensor, scores: Tensor) -> Tensor:
    """The columns of scores [R, V] that tokens [R, S] stand for: V, a spare one, for those that do not count [R, S]."""
    return torch.where(counts, token_ids.clamp(max=scores.shape[1]), scores.shape[1])


READERS: dict[type, Callable[[Any, TokenHistory, int], TextProcessor]] = {
    stock.RepetitionPenaltyLogitsProcessor: RepetitionPenalty.read,
    stock.NoRepeatNGramLogitsProcessor: lambda one, *_: NoRepeatedNgrams(one.ngram_size),
    stock.SequenceBiasLogitsProcessor: SequenceBias.read,
    stock.NoBadWordsLogitsProcessor: SequenceBias.read,
    stock.MinLengthLogitsProcessor: lambda one, *rest: _forbid(one.eos_token_id, 0, one.min_length, *rest),
    stock.MinNewTokensLengthLogitsProcessor: lambda one, *rest: _forbid(
        one.eos_token_id, 0, one.prompt_length_to_skip + one.min_new_tokens, *rest
    ),
    stock.ForcedBOSTokenLogitsProcessor: lambda one, *rest: _force(one.bos_token_id, 1, *rest),
    stock.ForcedEOSTokenLogitsProcessor: lambda one, *rest: _force(one.eos_token_id, one.max_length - 1, *rest),
}
