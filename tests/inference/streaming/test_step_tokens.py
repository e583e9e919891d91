"""StepTokens: which tokens of a step were drafted, and at what depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftsmith.inference import DynamicTree, StaticTree, StepTokens, chain, generate, stream
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

MODEL = tiny_target("llama", initializer_range=0.3)
PROMPTS = random_prompt(6, batch_size=3)
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.0, "seed": 5}
TREES = {
    "chain": chain(3),
    "static": StaticTree([[0], [1], [2], [0, 0], [1, 0], [1, 1]]),
    "dynamic": DynamicTree(3, 4, 16),
}


def scripted(texts: torch.Tensor, **options: Any) -> ScriptedDrafter:
    return ScriptedDrafter(list(texts), VOCAB_SIZE, **options)


def assert_told(steps: list[StepTokens], ranks: torch.Tensor) -> None:
    """Compares steps with the script, which knows the rank at which it offered each position's token.

    Args:
        ranks: [T] of the text; the steps begin at position 6.
    """
    position = 6
    for step in steps:
        assert step.depths == [place + 1 if place < step.num_drafted else 0 for place in range(len(step))]
        # A script offers no token of a higher rank.
        assert all(ranks[position + place] < 4 for place in range(step.num_drafted))
        position += len(step)


@pytest.mark.parametrize(("tree", "options"), [("chain", GREEDY), ("static", SAMPLED), ("dynamic", GREEDY)])
def test_streams_tell_which_tokens_were_drafted(tree: str, options: dict[str, Any]) -> None:
    text = generate(MODEL, None, PROMPTS[:1], **{**options, "max_new_tokens": 40}).sequences
    drafter = scripted(text)
    tokens = stream(MODEL, drafter, PROMPTS[:1], tree=TREES[tree], is_coupled=False, **options)
    steps = list(tokens)
    assert [token for step in steps for token in step] == text[0, 6:30].tolist()
    assert_told(steps, drafter._write_script().ranks[0])
    assert steps[0].depths == [0]
    # The limit may cut the last step.
    assert all(step.depths[-1] == 0 and step.num_drafted == len(step) - 1 for step in steps[1:-1])
    histogram = tokens.output.stats.accepted_histogram
    assert sum(number * count for number, count in enumerate(histogram)) >= sum(step.num_drafted for step in steps) > 4
