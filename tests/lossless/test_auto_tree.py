"""Trees of sizes chosen at every step: whatever is chosen, however long the drafter was left out, the text stays."""

from __future__ import annotations

import pytest
import torch

from inference import generate
from tests.lossless.near_tie import assert_same_text
from tests.lossless.restless import restless
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_text_is_transformers_generate(family: str) -> None:
    model = tiny_target(family, initializer_range=0.3)
    prompt = random_prompt(12)
    expected = model.generate(prompt, max_new_tokens=150, do_sample=False)
    decoder, planner = restless(model, ScriptedDrafter([expected[0]], VOCAB_SIZE))
    output = decoder.generate(prompt, max_new_tokens=150, do_sample=False)
    assert_same_text(model, expected, output.sequences)
    assert planner.taken == {None, *range(len(planner.trees))}
    assert len(output.stats.accepted_histogram) == 5, "not every depth was reached"
    assert output.stats.num_host_syncs == output.stats.num_verify_steps


@pytest.mark.parametrize("is_coupled", [True, False], ids=["coupled", "uncoupled"])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "repetition_penalty": 1.2}]
)
def test_sampled_text_is_plain_decoding(settings: dict[str, float], is_coupled: bool) -> None:
    model = tiny_target("qwen3", initializer_range=0.3)
    prompt = random_prompt(9)
    options = {"max_new_tokens": 100, "do_sample": True, "seed": 5, **settings}
    expected = generate(model, None, prompt, **options).sequences
    decoder, _ = restless(model, ScriptedDrafter([expected[0]], VOCAB_SIZE), is_coupled=is_coupled)
    assert torch.equal(decoder.generate(prompt, **options).sequences, expected)


def test_the_real_planner_measures_and_decodes() -> None:
    model = tiny_target("llama", initializer_range=0.3)
    prompt = random_prompt(12)
    expected = model.generate(prompt, max_new_tokens=60, do_sample=False)
    output = generate(
        model, ScriptedDrafter([expected[0]], VOCAB_SIZE), prompt, tree="auto", max_new_tokens=60, do_sample=False
    )
    assert_same_text(model, expected, output.sequences)
