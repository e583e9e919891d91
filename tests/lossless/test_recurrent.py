"""Targets with recurrent layers: greedy text is transformers', sampled text is plain decoding's."""

from typing import Any

import pytest
import torch

from draftsmith.heads import HEAD_TYPES
from draftsmith.inference import Decoder, Target, generate, prefill
from draftsmith.inference.cache.recurrent_states import RecurrentStates
from tests.lossless.matrix.drafters import PLAIN, drafter_of, policy_of
from tests.lossless.matrix.references import attentions_of, target_of
from tests.lossless.near_tie import assert_same_text
from tests.params import slow_but
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import RECURRENT_FAMILIES, VOCAB_SIZE, pad_prompts, random_prompt, tiny_target

GREEDY: dict[str, Any] = {"do_sample": False}
# Gated delta rule; prompts that are read whole; attention beside recurrence; convolutions, drafted in one call.
CORE = tuple(
    pytest.param(family, marks=() if place < 2 else pytest.mark.slow)
    for place, family in enumerate(("qwen3_5", "mamba", "falcon_h1", "lfm2"))
    if family in RECURRENT_FAMILIES
)
QUICK_DRAFTERS = [("qwen3_5", "eagle3"), ("qwen3_5", "staged"), ("mamba", "small model")]
POLICIES = ("chain", "dynamic", "static")
# Of each kind of recurrence by itself, beside attention, and beside experts.
QUICK_FAMILIES = ("qwen3_5", "kimi_linear", "mamba", "mamba2", "lfm2", "lfm3", "zaya")
pytestmark = pytest.mark.skipif(not RECURRENT_FAMILIES, reason="this release of transformers has no cache for states")


def expect(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        pytest.param(family, policy, marks=() if family in QUICK_FAMILIES and number % 2 == place else pytest.mark.slow)
        for number, family in enumerate(RECURRENT_FAMILIES)
        for place, policy in enumerate(POLICIES)
    ],
)
def test_greedy_text_is_transformers_generate(family: str, policy: str) -> None:
    model = tiny_target(family, initializer_range=0.3)
    prompt = random_prompt(7)
    expected = expect(model, prompt, max_new_tokens=32, **GREEDY)
    drafter = ScriptedDrafter([expected[0]], VOCAB_SIZE)
    output = generate(model, drafter, prompt, max_new_tokens=32, tree=policy_of(policy), **GREEDY)
    assert_same_text(model, expected, output.sequences)
    assert output.stats.acceptance_length > 1.5
    assert len(set(expected[0, 7:].tolist())) > 15, "the text repeats itself, and so tests little"


@pytest.mark.parametrize("policy", slow_but({"none", "dynamic"}, ["none", "chain", "dynamic"]))
@pytest.mark.parametrize("family", CORE)
def test_batches(family: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several lengths, read in chunks, that end at different steps and then leave, or stay."""
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 8)
    model = tiny_target(family, initializer_range=0.3)
    target, lengths, longest = Target(model), (21, 4, 13), 21
    rows = [random_prompt(length, seed=length) for length in lengths]
    options = {"max_new_tokens": 20, "eos_token_id": int(expect(model, rows[1], max_new_tokens=5, **GREEDY)[0, -1])}
    expected = [expect(model, row, **options, **GREEDY)[0] for row in rows]
    assert len({len(text) - length for text, length in zip(expected, lengths, strict=True)}) > 1
    for can_leave in (True,) if policy == "none" else (True, False):
        drafter = None if policy == "none" else ScriptedDrafter(expected, VOCAB_SIZE, can_copy_rows=can_leave)
        output = generate(target, drafter, **pad_prompts(rows), tree=policy_of(policy), **options, **GREEDY)
        for row, text in enumerate(expected):
            own = output.sequences[row : row + 1, longest - lengths[row] :][:, : len(text)]
            assert_same_text(model, text[None], own)


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        pytest.param(family, drafter, marks=() if (family, drafter) in QUICK_DRAFTERS else pytest.mark.slow)
        for family in ("qwen3_5", "mamba", "falcon_h1", "lfm2")
        for drafter in sorted({*PLAIN, *HEAD_TYPES} - {"kangaroo"})
        if family in RECURRENT_FAMILIES
    ],
)
def test_drafters_of_every_kind(family: str, drafter: str) -> None:
    """Two rows, sampled and greedy. Kangaroo's heads read the target's first layers by themselves: they are refused."""
    attention = attentions_of(family)[0]
    target = target_of(family, attention, 0)
    batch = pad_prompts([random_prompt(length, seed=length) for length in (9, 5)])
    for options in (GREEDY, {"do_sample": True, "temperature": 0.7, "seed": 3}):
        plain = generate(target, None, **batch, **options, max_new_tokens=12).sequences
        for policy in ("chain",) if drafter == "staged" else ("chain", "dynamic"):
            drafting = drafter_of(drafter, family, attention, 0)
            tree = policy_of(policy, drafting.max_depth)
            output = generate(target, drafting, **batch, **options, max_new_tokens=12, tree=tree)
            assert torch.equal(output.sequences, plain)
            assert output.stats.num_verify_steps > 0


@pytest.mark.parametrize("family", CORE)
def test_a_conversation_is_read_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn begins with the first, of which the states before the last step, or after all, are held."""
    model = tiny_target(family, initializer_range=0.3)
    first = random_prompt(40)
    text = expect(model, first, max_new_tokens=12, **GREEDY)
    second = torch.cat([text, random_prompt(6, seed=1)], dim=1)
    expected = expect(model, second, max_new_tokens=12, **GREEDY)
    copied: list[int] = []
    copy_rows = RecurrentStates.copy_rows

    def watch(states: Any, source: Any, rows: Any, lengths: Any) -> None:
        copied.extend(lengths)
        copy_rows(states, source, rows, lengths)

    monkeypatch.setattr(RecurrentStates, "copy_rows", watch)
    for drafter in (None, ScriptedDrafter([expected[0]], VOCAB_SIZE, is_strict=False)):
        decoder = Decoder(model, drafter, tree=None if drafter is None else "chain:3")
        decoder.generate(first, max_new_tokens=12, **GREEDY)
        again = decoder.generate(second, max_new_tokens=12, reuse_cache=True, **GREEDY)
        assert_same_text(model, expected, again.sequences)
        assert copied.pop() > 40
        # A prompt that leaves the text before the end of what is held is read anew.
        other = torch.cat([text[:, :30], random_prompt(6, seed=2)], dim=1)
        for reuse in (True, False):
            output = decoder.generate(other, max_new_tokens=6, reuse_cache=reuse, **GREEDY)
            assert_same_text(model, expect(model, other, max_new_tokens=6, **GREEDY), output.sequences)
            assert not copied


def test_a_shared_beginning_is_read_once_in_plain_decoding() -> None:
    model = tiny_target("qwen3_5", initializer_range=0.3)
    rows = [torch.cat([random_prompt(40), random_prompt(length, seed=length)], dim=1) for length in (3, 9)]
    output = generate(model, None, **pad_prompts(rows), max_new_tokens=8, **GREEDY)
    for row, prompt in enumerate(rows):
        expected = expect(model, prompt, max_new_tokens=8, **GREEDY)
        assert torch.equal(output.sequences[row : row + 1, 49 - prompt.shape[1] :], expected)
