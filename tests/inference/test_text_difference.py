"""Where two texts differ, and what counts as a near-tie."""

from typing import Any

import pytest
import torch

from draftsmith.inference import Decoder, Target
from draftsmith.inference.text_difference import find_difference
from tests.tiny_targets import random_prompt, tiny_target

LENGTH = 8


def decode(target: Target, prompt: torch.Tensor, **options: Any) -> list[int]:
    output = Decoder(target).generate(prompt, torch.ones_like(prompt), max_new_tokens=LENGTH, **options)
    return output.sequences[0, prompt.shape[1] :].tolist()


def replace(text: list[int], place: int, token: int) -> list[int]:
    return [*text[:place], token, *text[place + 1 :]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fault_is_no_near_tie(dtype: torch.dtype) -> None:
    target, prompt = Target(tiny_target("llama").to(dtype)), random_prompt(5)
    text = decode(target, prompt)
    with torch.inference_mode():
        logits = target.model(torch.cat([prompt, torch.tensor([text[:3]])], dim=1)).logits[0, -1].float()
    worst = int(logits.argmin())
    found = find_difference(target, prompt, text, replace(text, 3, worst))
    assert (found.place, found.tokens) == (3, (text[3], worst))
    both = [text[3], worst]
    assert found.log_probs == pytest.approx(logits.log_softmax(-1)[both].tolist(), abs=0.05)
    assert found.gap == pytest.approx(float(logits[text[3]] - logits[worst]), abs=0.05)
    size = logits[both].abs().max().to(dtype)
    assert found.resolution == pytest.approx(float(torch.nextafter(size, size.new_tensor(torch.inf)) - size))
    assert not found.is_near_tie
    assert "--dtype float64" not in found.explain(["--dtype float64"])
    assert find_difference(target, prompt, text, text) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_near_tie_is_told_with_its_cure(dtype: torch.dtype) -> None:
    """Two tokens with the same weights in the LM head."""
    options: dict[str, Any] = {"suppress_tokens": [5]}
    model = tiny_target("llama", tie_word_embeddings=False).to(dtype)
    target, prompt = Target(model), random_prompt(5)
    text = decode(target, prompt, **options)
    twin = next(token for token in range(128) if token not in {*text, *prompt[0].tolist()})
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[text[0]]
    found = find_difference(target, prompt, text, replace(text, 0, twin), **options)
    assert found.gap == 0
    assert found.is_near_tie
    told = found.explain(["--batch_invariant true", "--dtype float32"])
    assert ("--dtype float32" in told) == (dtype == torch.bfloat16)
    assert "--batch_invariant true" in told
    assert f"{found.log_probs[0]:.4f}" in told
    exact = find_difference(target.batch_invariant(), prompt, text, replace(text, 0, twin), **options)
    assert not exact.is_near_tie, "no pass rounds differently in this mode"
