"""The scripted drafter through every policy: greedy text is transformers', sampled text is plain decoding's."""

import pytest
import torch

from draftsmith.inference import generate, prefill
from tests.lossless.matrix.drafters import policy_of
from tests.lossless.near_tie import assert_same_text
from tests.params import slow_but
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import SLIDING_WINDOW, VOCAB_SIZE, pad_prompts, random_prompt, tiny_target
from tests.watched_passes import watch_passes

POLICIES = {name: policy_of(name) for name in ("chain", "static", "dynamic")}


@pytest.mark.parametrize("place", [1, 2, 4, 5, 6, 11])
def test_a_text_ends_at_any_place_of_a_step(place: int) -> None:
    """At EOS, or at the largest number of new tokens."""
    model = tiny_target("llama", initializer_range=0.3)
    prompt = random_prompt(6)
    free = model.generate(prompt, max_new_tokens=40, do_sample=False)
    drafter = ScriptedDrafter([free[0]], VOCAB_SIZE, ranks=(0,))
    for end in ({"max_new_tokens": 30, "eos_token_id": int(free[0, 6 + place])}, {"max_new_tokens": place}):
        options = {"do_sample": False, **end}
        expected = model.generate(prompt, **options)
        output = generate(model, drafter, prompt, tree=POLICIES["dynamic"], **options)
        assert torch.equal(output.sequences, expected)
        assert output.stats.num_new_tokens == expected.shape[1] - 6


@pytest.mark.parametrize("policy", slow_but({"none", "dynamic"}, ["none", "static", "dynamic"]))
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_batches_far_beyond_the_window(family: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in several chunks; rows end at their own EOS, the longest of them first."""
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 32)
    starts = watch_passes(monkeypatch, lambda cache, view: view - cache.window_sizes[SLIDING_WINDOW].shape[0])
    model = tiny_target(family, initializer_range=0.3)
    lengths, longest = (101, 70, 85), 101
    rows = [random_prompt(length, seed=length) for length in lengths]
    free = model.generate(rows[0], max_new_tokens=20, do_sample=False)
    options = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": int(free[0, -1])}
    expected = [model.generate(row, **options)[0] for row in rows]
    drafter = None if policy == "none" else ScriptedDrafter(expected, VOCAB_SIZE)
    output = generate(model, drafter, **pad_prompts(rows), tree=policy_of(policy), **options)
    for row, text in enumerate(expected):
        assert_same_text(model, text[None], output.sequences[row : row + 1, longest - lengths[row] :][:, : len(text)])
    assert {len(text) - length for text, length in zip(expected, lengths, strict=True)} != {80}
    assert {0, 64} <= set(starts)
