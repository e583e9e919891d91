"""Kinds of transformers' logits processors that read no text, and OpenAI's penalties, which transformers has not.

Those that read it are in `text_processors.py`. Processors of other types may also keep a state (a grammar).
"""

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as stock

NO_TOKEN = -1  # instead of an emitted token: all scores were NaN, or -inf


# They read one row of scores and nothing else, so they may run on all nodes of a tree at once.
PREFIX_FREE: frozenset[type] = frozenset(
    {
        stock.TemperatureLogitsWarper,
        stock.TopKLogitsWarper,
        stock.TopPLogitsWarper,
        stock.MinPLogitsWarper,
        stock.TopHLogitsWarper,
        stock.TypicalLogitsWarper,
        stock.EpsilonLogitsWarper,
        stock.EtaLogitsWarper,
        stock.SuppressTokensLogitsProcessor,
        stock.InfNanRemoveLogitsProcessor,
        stock.LogitNormalization,
    }
)
# They do not read which token a column stands for, so they may also process scores over a reduced draft vocabulary.
COLUMN_FREE = PREFIX_FREE - {stock.SuppressTokensLogitsProcessor}


class OccurrencePenaltiesLogitsProcessor(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """OpenAI's penalties on tokens that were emitted already; the prompt does not count.

    Args:
        presence: subtracted from the scores of tokens that occur; negative values encourage them.
        frequency: subtracted once for each occurrence.
        prompt_length: tokens of the prompt.
    """

    def __init__(self, *, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        emitted = input_ids[:, self.prompt_length :]
        every = torch.ones_like(emitted, dtype=torch.bool)
        return penalise_occurrences(scores, emitted, every, self.presence, self.frequency)


def penalise_occurrences(
    scores: Tensor, token_ids: Tensor, is_emitted: Tensor, presence: float, frequency: float
) -> Tensor:
    """Scores [R, V] after texts [R, S], of which only the tokens count that `is_emitted` [R, S]."""
    vocab_size = scores.shape[1]
    columns = torch.where(is_emitted, token_ids.clamp(max=vocab_size), vocab_size)  # a spare column for the others
    counts = scores.new_zeros(scores.shape[0], vocab_size + 1)
    counts = counts.scatter_add(1, columns, torch.ones_like(columns, dtype=scores.dtype))[:, :vocab_size]
    return scores - frequency * counts - presence * (counts > 0)
