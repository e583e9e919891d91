"""Kinds of transformers' logits processors that read no text.

Those that read it are in `text_processors.py`. Processors of other types may also keep a state (a grammar).
"""

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
