"""Kinds of transformers' logits processors that read no text.

Those that read it are in `text_processors.py`. Processors of other types may also keep a state (a grammar).
"""

from __future__ import annotations

from transformers.generation import logits_process

NO_TOKEN = -1  # instead of an emitted token: all scores were NaN, or -inf


def _find_types(*names: str) -> frozenset[type]:
    """The named processor classes, as far as the installed transformers release has them."""
    return frozenset(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# They read one row of scores and nothing else, so they may run on all nodes of a tree at once.
PREFIX_FREE = _find_types(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TopHLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)
# They do not read which token a column stands for, so they may also process scores over a reduced draft vocabulary.
COLUMN_FREE = PREFIX_FREE - _find_types("SuppressTokensLogitsProcessor")
