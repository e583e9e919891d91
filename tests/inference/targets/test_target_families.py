"""Whole texts of every family in half precision and at the limits of positions; `tests/lossless` has the others."""

import logging

import pytest
import torch

from draftsmith.inference import DynamicTree, NgramDrafter, Target, generate
from draftsmith.training.features.encoding import encode
from tests.inference.plain_passes import ATOL, calm_target, run_plainly
from tests.inference.targets.test_target_refusals import make
from tests.lossless.near_tie import assert_same_text
from tests.params import slow_but
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import (
    CORE_FAMILIES,
    FAMILIES,
    RECURRENT_FAMILIES,
    ROPE_SWITCH,
    VOCAB_SIZE,
    random_prompt,
    tiny_target,
)

TREE = DynamicTree(depth=4, top_k=4, num_nodes=24)
HALVES = (torch.bfloat16, torch.float16)


CASES = {f"{family}-bfloat16": (family, torch.bfloat16) for family in (*FAMILIES, *RECURRENT_FAMILIES)}
CASES |= {f"{family}-float16": (family, torch.float16) for family in (*CORE_FAMILIES, *RECURRENT_FAMILIES)}
QUICK = {f"{family}-bfloat16" for family in ("llama", "mixtral", "gpt_oss", "qwen3_5", "lfm3")} | {"gemma3-float16"}


@pytest.mark.parametrize(("family", "dtype"), slow_but(QUICK & CASES.keys(), CASES))
def test_half_precision_targets_decode(family: str, dtype: torch.dtype) -> None:
    """Every token is the best of the model's own logits for its prefix, but for rounding."""
    model = tiny_target(family, dtype=dtype, initializer_range=0.1)
    assert Target(model).dtype == dtype
    prompt = random_prompt(6)
    output = generate(model, NgramDrafter(), prompt, max_new_tokens=16, do_sample=False)
    logits = run_plainly(model, output.sequences[0].tolist()).logits[0, 5:-1].float()
    chosen = logits.gather(1, output.sequences[0, 6:, None])[:, 0]
    # A unit in the last place of the largest of the numbers that were added up.
    assert (logits.amax(-1) - chosen).max() <= 8 * torch.finfo(dtype).eps * logits.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT_FAMILIES])
def test_no_weights_are_refused(family: str, dtype: torch.dtype) -> None:
    """The probe at construction tells a way of computing from rounding, whatever the scale of the weights."""
    # At the largest these overflow float16, or enlarge rounding as much as a wrong mask would.
    is_wild = family in ("olmo_hybrid", "zamba", "zamba2")
    for seed in range(4):
        for weights in (0.02, 0.1) if is_wild else (0.02, 0.1, 0.5):
            target = Target(tiny_target(family, seed, dtype=dtype, initializer_range=weights))
            target.compute_logits(torch.zeros(1, target.hidden_size, dtype=dtype))


@pytest.mark.parametrize("family", ["llama-dynamic", "llama-longrope"])
def test_texts_end_where_rope_would_change(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Exact up to the last position below the switch, then a warning; a prompt that reaches it is refused."""
    model = calm_target(family)
    target = Target(model)
    assert target.max_length == ROPE_SWITCH
    prompt = random_prompt(ROPE_SWITCH - 12)
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    drafter = ScriptedDrafter([expected[0]], VOCAB_SIZE)
    with caplog.at_level(logging.WARNING, logger="draftsmith.inference"):
        output = generate(target, drafter, prompt, max_new_tokens=30, do_sample=False, tree=TREE)
    assert_same_text(model, expected, output.sequences)
    assert output.sequences.shape[1] == ROPE_SWITCH
    assert "generation will stop at the target's limit of 192 tokens (RoPE of type" in caplog.text
    last = random_prompt(ROPE_SWITCH - 1)
    expected = model.generate(last, attention_mask=torch.ones_like(last), max_new_tokens=1, do_sample=False)
    assert torch.equal(generate(target, None, last, max_new_tokens=1, do_sample=False).sequences, expected)
    with pytest.raises(ValueError, match=r"has 192 tokens; .* fewer than 192 \(RoPE"):
        generate(target, None, random_prompt(ROPE_SWITCH), max_new_tokens=1)


def test_a_model_that_asks_for_sdpa_by_name() -> None:
    """Falcon compares its implementation's name with "sdpa": under another name it would add boolean masks."""
    model = make("falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False)
    tokens = random_prompt(9, vocab_size=64)
    encoded = encode(Target(model), tokens, torch.ones_like(tokens))
    wanted = run_plainly(model, tokens[0].tolist()).hidden_states[-1]
    torch.testing.assert_close(encoded.last_hidden, wanted, atol=ATOL, rtol=0)
