"""Texts of both sides: where a text ends, and acceptance lengths."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Text:
    """tokens: after the prompt. lengths: tokens of each verify step, its bonus token or its root counted."""

    tokens: list[int]
    lengths: list[int]


def trim(text: Text, eos: int, max_new_tokens: int) -> Text:
    """A peer's text as this library ends it: at `max_new_tokens` or after the first EOS, without the steps after that.

    A peer's step appends its root and the drafts accepted after it; the bonus token is the next step's root. Here the
    root is known before the step:

    >>> trim(Text([5, 6, 2, 9, 9], [2, 1, 2]), eos=2, max_new_tokens=8)  # the first step's bonus token is EOS
    Text(tokens=[5, 6, 2], lengths=[2])
    """
    end = min(text.tokens.index(eos) + 1 if eos in text.tokens else max_new_tokens, max_new_tokens)
    lengths, known = [], 1
    for length in text.lengths:
        if known >= end:
            break
        lengths.append(length)
        known += length
    return replace(text, tokens=text.tokens[:end], lengths=lengths)


def mean_and_error(texts: Sequence[Text], num_seeds: int) -> tuple[float, float]:
    """Tokens per verify step of all texts together, and the standard error of this ratio over prompts.

    Args:
        texts: `num_seeds` of each prompt, one prompt after the other.
    """
    prompts = [texts[place : place + num_seeds] for place in range(0, len(texts), num_seeds)]
    lengths = [[length for text in own for length in text.lengths] for own in prompts]
    num_steps = sum(map(len, lengths))
    mean = sum(map(sum, lengths)) / num_steps
    if len(lengths) == 1:
        return mean, 0.0
    left = [sum(own) - mean * len(own) for own in lengths]  # of the ratio estimator, whose sum is 0
    return mean, statistics.stdev(left) * len(left) ** 0.5 / num_steps
