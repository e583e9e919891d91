"""Measures how much texts repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence


def share_of_repeated_ngrams(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of all n-grams that already occurred earlier in the same text.

    >>> share_of_repeated_ngrams([[1, 2, 1, 2, 1, 2, 3]])  # 1212 2121 1212 2123
    0.25
    """
    grams = [[tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in texts]
    total = sum(map(len, grams))
    return 1 - sum(len(set(one)) for one in grams) / total if total else 0.0
