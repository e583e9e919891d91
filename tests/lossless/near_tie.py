"""Losslessness is token identity; a difference counts as rounding only when it is shown to be a near-tie: the two
tokens have nearly equal scores in a plain pass, and nothing else scores higher. Anything else is a bug.

Legend: L tokens of a text, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.noise import row_seeds

# Logits [V] after a text [L] -> the scores [V] that the token is picked by.
Scores = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def explain_difference(
    model: Any, expected: Tensor, got: Tensor, *, scores: Scores | None = None
) -> tuple[int, float, str] | None:
    """None when two token rows [L] are equal; else (position, gap, a sentence with the numbers) of the difference.

    The gap is how far the lower of the two tokens' scores is below the best one, on the common prefix, in a plain pass
    without cache.

    Args:
        scores: what tokens are picked by; None = the logits, for greedy texts without processors.
    """
    if torch.equal(expected, got):
        return None
    length = min(len(expected), len(got))
    different = (expected[:length] != got[:length]).nonzero()
    position = int(different[0]) if len(different) else length
    if position >= length:
        return position, float("inf"), f"one text ends at {position}, the other goes on"
    prefix, pair = expected[:position], [int(expected[position]), int(got[position])]
    plain = model(prefix[None], use_cache=False).logits[0, -1].float()
    plain = plain if scores is None else scores(plain, prefix)
    first, second = plain[pair].tolist()
    sentence = (
        f"position {position}: token {pair[0]} has score {first:.6f}, token {pair[1]} has {second:.6f}, and token "
        f"{int(plain.argmax())} has {plain.max().item():.6f}"
    )
    return position, plain.max().item() - min(first, second), sentence


def assert_same_text(
    model: Any, expected: Tensor, got: Tensor, *, tolerance: float = 1e-4, scores: Scores | None = None
) -> list[str]:
    """Rows [B, L] are equal, or differ first at a near-tie (printed with its numbers, and returned)."""
    assert expected.shape[0] == got.shape[0]
    ties = []
    for row in range(expected.shape[0]):
        difference = explain_difference(model, expected[row], got[row], scores=scores)
        if difference is not None:
            _, gap, sentence = difference
            assert gap < tolerance, sentence
            ties.append(f"near-tie, {sentence}")
            print(ties[-1])
    return ties


def picking_scores(model: Any, seed: int | None = None, **options: Any) -> Scores:
    """The scores by which a row with these options picks its tokens: processed logits, plus its noise when it samples.

    Args:
        seed: the row's own, as in a list of seeds; only needed to sample.
        options: those of `generate`, such as do_sample, temperature and repetition_penalty.
    """
    found: list[Any] = []

    def keep_processors(
        model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **_: Any
    ) -> Tensor:
        found.append(logits_processor)
        return input_ids

    def scores(logits: Tensor, text: Tensor) -> Tensor:
        model.generate(text[None], custom_generate=keep_processors, **options)
        do_sample = bool(options.get("do_sample"))
        seeds = row_seeds([seed], 1, text.device) if do_sample and seed is not None else None
        sampler = Sampler(do_sample=do_sample, row_seeds=seeds)
        processed = found.pop()(text[None], logits[None].float())
        noise = sampler.draw_noise(torch.tensor([len(text) - 1]), 1, logits.shape[-1])
        return processed[0] if noise is None else processed[0] + noise[0, 0]

    return scores
