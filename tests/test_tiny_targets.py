"""The targets that other tests stand on: random, but neither constant nor forgetful."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.tiny_targets import (
    CORE_FAMILIES,
    FAMILIES,
    SLIDING_WINDOW,
    random_prompt,
    tiny_target,
)


def is_periodic(tokens: Sequence[int], longest: int = 20) -> bool:
    """Whether the text repeats one passage of at most `longest` tokens."""
    return any(tokens[period:] == tokens[:-period] for period in range(1, longest + 1))


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        *(pytest.param(family, 0.3, marks=() if family in CORE_FAMILIES else pytest.mark.slow) for family in FAMILIES),
        *(
            pytest.param(family, 0.5, marks=() if family in ("llama", "gemma3") else pytest.mark.slow)
            for family in CORE_FAMILIES
        ),
    ],
)
def test_greedy_text_keeps_changing_and_depends_on_the_prompt(family: str, weights: float) -> None:
    target = tiny_target(family, initializer_range=weights)
    prompts = random_prompt(2 * SLIDING_WINDOW, batch_size=2)
    output = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=60, do_sample=False)
    first, second = output[:, prompts.shape[1] :].tolist()
    assert len(set(first)) > 15
    assert not is_periodic(first[20:])
    assert first != second
