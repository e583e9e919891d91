"""The scripted drafter through every policy: greedy text is transformers', sampled text is plain decoding's."""

from __future__ import annotations

import pytest
import torch

from inference import DynamicTree, GenerationStats, StaticTree, TreePolicy, chain, generate, prompts
from tests.lossless.near_tie import assert_same_text
from tests.lossless.watched_commits import Commits, watch_commits
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import CORE_FAMILIES, SLIDING_WINDOW, VOCAB_SIZE, pad_prompts, random_prompt, tiny_target
from tests.watched_passes import watch_passes

NEW_TOKENS = 64
POLICIES: dict[str, TreePolicy] = {
    "chain": chain(4),
    "static": StaticTree([[0], [1], [2], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0], [0, 1, 0]]),
    "dynamic": DynamicTree(depth=4, top_k=4, num_nodes=32),  # 28 are the fewest with a node of the worst rank
}
SAMPLING = {
    "T=0.7": {"temperature": 0.7},
    "T=1": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "repetition penalty": {"temperature": 0.8, "repetition_penalty": 1.3},
    "no repeated bigram": {"temperature": 1.0, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize(("policy", "attention"), [*zip(POLICIES, ("sdpa", "eager", "sdpa"), strict=True)])
@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_greedy_text_is_transformers_generate(family: str, attention: str, policy: str) -> None:
    # Prompts of 5 and 30 tokens: below and beyond the window of 8 of Mistral and Gemma 3.
    model = tiny_target(family, attn_implementation=attention, initializer_range=0.3)
    commits = Commits()
    stats = GenerationStats()
    for length in (5, 30):
        prompt = random_prompt(length, seed=length)
        expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        drafter = ScriptedDrafter([expected[0]], VOCAB_SIZE)
        with watch_commits(commits):
            output = generate(model, drafter, prompt, max_new_tokens=NEW_TOKENS, do_sample=False, tree=POLICIES[policy])
        assert_same_text(model, expected, output.sequences)
        stats += output.stats
    histogram = stats.accepted_histogram
    assert len(histogram) == 5, f"not every depth was reached: {histogram}"
    assert min(histogram) > 0, f"not every depth was reached: {histogram}"
    assert stats.acceptance_length > 1.5
    if policy != "chain":
        ranks = {path[-1] for path in commits.paths}
        assert ranks == {0, 1, 2, 3}, f"not every branch was accepted: {sorted(commits.paths)}"
        assert commits.num_moved > 0


@pytest.mark.parametrize("settings", SAMPLING)
@pytest.mark.parametrize(("policy", "is_coupled"), [("dynamic", True), ("static", False)])
def test_sampled_text_is_plain_decoding(settings: str, policy: str, is_coupled: bool) -> None:
    model = tiny_target("qwen3", initializer_range=0.3)
    prompt = random_prompt(9)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "seed": 5, **SAMPLING[settings]}
    expected = generate(model, None, prompt, **options).sequences
    drafter = ScriptedDrafter([expected[0]], VOCAB_SIZE)
    output = generate(model, drafter, prompt, tree=POLICIES[policy], is_coupled=is_coupled, **options)
    assert torch.equal(output.sequences, expected)
    assert sum(output.stats.accepted_histogram[1:]) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_prefix_readers_match_transformers_greedy(policy: str) -> None:
    model = tiny_target("llama", initializer_range=0.3)
    prompt = random_prompt(7)
    options = {"max_new_tokens": 48, "do_sample": False, "repetition_penalty": 1.4, "min_new_tokens": 10}
    expected = model.generate(prompt, **options)
    drafter = ScriptedDrafter([expected[0]], VOCAB_SIZE)
    output = generate(model, drafter, prompt, tree=POLICIES[policy], **options)
    assert_same_text(model, expected, output.sequences)
    assert output.stats.acceptance_length > 1.5


@pytest.mark.parametrize("policy", [None, "static", "dynamic"])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_batches_far_beyond_the_window(family: str, policy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in several chunks; rows end at their own EOS, the longest of them first."""
    monkeypatch.setattr(prompts, "PREFILL_CHUNK", 32)
    starts = watch_passes(monkeypatch, lambda cache, view: view - cache.window_sizes[SLIDING_WINDOW].shape[0])
    model = tiny_target(family, initializer_range=0.3)
    lengths, longest = (101, 70, 85), 101
    rows = [random_prompt(length, seed=length) for length in lengths]
    free = model.generate(rows[0], max_new_tokens=20, do_sample=False)
    options = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": int(free[0, -1])}
    expected = [model.generate(row, **options)[0] for row in rows]
    drafter = None if policy is None else ScriptedDrafter(expected, VOCAB_SIZE)
    output = generate(model, drafter, **pad_prompts(rows), tree=POLICIES[policy] if policy else None, **options)
    for row, text in enumerate(expected):
        assert_same_text(model, text[None], output.sequences[row : row + 1, longest - lengths[row] :][:, : len(text)])
    assert {len(text) - length for text, length in zip(expected, lengths, strict=True)} != {80}
    assert {0, 64} <= set(starts)


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_never_longer_than_asked(max_new_tokens: int) -> None:
    model = tiny_target("llama", initializer_range=0.3)
    prompt = random_prompt(6)
    expected = model.generate(prompt, max_new_tokens=40, do_sample=False)
    drafter = ScriptedDrafter([expected[0]], VOCAB_SIZE, ranks=(0,))
    output = generate(model, drafter, prompt, max_new_tokens=max_new_tokens, do_sample=False, tree=POLICIES["dynamic"])
    assert torch.equal(output.sequences, expected[:, : 6 + max_new_tokens])
    assert output.stats.num_new_tokens == max_new_tokens


@pytest.mark.parametrize("place", range(1, 12))
def test_trimmed_after_eos(place: int) -> None:
    """Whatever token of a step is EOS, nothing follows it."""
    model = tiny_target("llama", initializer_range=0.3)
    prompt = random_prompt(6)
    free = model.generate(prompt, max_new_tokens=30, do_sample=False)
    eos = int(free[0, 6 + place])
    expected = model.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=eos)
    drafter = ScriptedDrafter([free[0]], VOCAB_SIZE, ranks=(0,))
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": eos}
    output = generate(model, drafter, prompt, tree=POLICIES["dynamic"], **options)
    assert torch.equal(output.sequences, expected)


def test_left_padded_batch_with_a_repetition_penalty() -> None:
    """transformers gives the penalty one prompt length per row; each row must see its own."""
    model = tiny_target("llama", initializer_range=0.3)
    lengths = (4, 9, 6)
    rows = [random_prompt(length, seed=length) for length in lengths]
    inputs = pad_prompts(rows)
    options = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.3}
    expected = model.generate(**inputs, **options)
    assert_same_text(model, expected, generate(model, None, **inputs, **options).sequences)
    drafter = ScriptedDrafter([text[9 - length :] for text, length in zip(expected, lengths, strict=True)], VOCAB_SIZE)
    output = generate(model, drafter, **inputs, tree=POLICIES["dynamic"], **options)
    assert torch.equal(output.sequences, expected)
