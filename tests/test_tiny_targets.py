"""The targets that other tests stand on: random, but neither constant nor forgetful."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_targets import FAMILIES, SLIDING_WINDOW, random_prompt, tiny_target


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_keeps_changing_and_depends_on_the_prompt(family: str) -> None:
    target = tiny_target(family)
    prompts = random_prompt(2 * SLIDING_WINDOW, batch_size=2)
    output = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=60, do_sample=False)
    first, second = output[:, prompts.shape[1] :].tolist()
    assert len(set(first)) > 15
    assert first != second


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(3)
    one = tiny_target("llama", seed=1)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    same, other = torch.rand(1), tiny_target("llama", seed=2)
    assert torch.equal(drawn, same), "building a target must leave torch's generator alone"
    again = tiny_target("llama", seed=1)
    assert torch.equal(one.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
