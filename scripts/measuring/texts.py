"""Compares texts with a reference, and measures how much texts repeat themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.inference import Target
from draftsmith.scripts.measuring.measure import Prompt


@dataclass
class Difference:
    """The first place where the text of a prompt differs from the reference.

    gap: at T = 0, the reference token's logit minus the other token's, from one forward pass over the common text.
    resolution: the distance of neighbouring numbers of the target's dtype at the size of that logit.
    """

    prompt: str
    position: int
    gap: float | None = None
    resolution: float | None = None


def find_step(value: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of `dtype` at the size of `value`.

    >>> find_step(15.9, torch.bfloat16), find_step(-16.0, torch.bfloat16)
    (0.0625, 0.125)
    """
    # Numbers from 2**e to 2**(e + 1) are eps * 2**e apart; frexp's exponent is e + 1.
    return torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1)


def share_of_repeated_ngrams(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of all n-grams that already occurred earlier in the same text.

    >>> share_of_repeated_ngrams([[1, 2, 1, 2, 1, 2, 3]])  # 1212 2121 1212 2123
    0.25
    """
    grams = [[tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in texts]
    total = sum(map(len, grams))
    return 1 - sum(len(set(one)) for one in grams) / total if total else 0.0


def find_difference(
    prompt: Prompt, expected: Sequence[int], found: Sequence[int], target: Target, *, has_gap: bool
) -> Difference:
    """Finds the first place where two texts differ; `has_gap` adds the target's logits of both tokens."""
    pairs = zip(expected, found, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    difference = Difference(prompt.id, position)
    if has_gap and position < min(len(expected), len(found)):
        common = torch.tensor([list(expected[:position])], dtype=torch.long, device=prompt.input_ids.device)
        with torch.no_grad():
            logits = target.model(torch.cat([prompt.input_ids, common], dim=1)).logits[0, -1]
        one, other = logits[expected[position]], logits[found[position]]
        difference.gap = float(one.float() - other.float())
        difference.resolution = find_step(float(one), logits.dtype)
    return difference
