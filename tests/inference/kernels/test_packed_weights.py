"""Packed weights: the same numbers up to rounding, and a model that stays as it was."""

import pytest
import torch
from torch import nn

from draftsmith.heads import HEAD_TYPES, create_heads
from draftsmith.inference import Decoder, Target
from draftsmith.inference.kernels.packed_weights import PackedLinear, pack
from tests.params import slow_but
from tests.tiny_targets import CORE_FAMILIES, FAMILIES, random_prompt, tiny_target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 16)])
def test_products_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40).to(dtype).requires_grad_(False)
    states = torch.randn(*shape, 96, dtype=dtype)
    packed = pack(linear)(states)
    assert (packed.shape, packed.dtype) == ((*shape, 40), dtype)
    torch.testing.assert_close(packed, linear(states))


@pytest.mark.parametrize("family", slow_but({*CORE_FAMILIES, "gpt2", "deepseek_v3", "gpt_oss"}, FAMILIES))
def test_a_model_and_its_twin_say_the_same(family: str) -> None:
    model = tiny_target(family)
    prompt, twin = random_prompt(20), pack(model)
    kinds = [type(module) for module in model.modules()]
    with torch.no_grad():
        ours, theirs = (one(prompt, output_hidden_states=True) for one in (twin, model))
    assert any(type(module) is PackedLinear for module in twin.modules())
    assert kinds == [type(module) for module in model.modules()]
    assert len(ours.hidden_states) == len(theirs.hidden_states) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(ours.logits, theirs.logits, atol=2e-4, rtol=2e-4)
    assert {id(weight) for weight in twin.parameters()} == {id(weight) for weight in model.parameters()}


@pytest.mark.parametrize("kind", slow_but({"kangaroo", "block"}, list(HEAD_TYPES)))
def test_texts_are_those_of_transformers(kind: str) -> None:
    model = tiny_target("llama")
    heads, prompt = create_heads(kind, Target.of(model)), random_prompt(9)
    text = Decoder(model, heads, pack_weights=True).generate(prompt, max_new_tokens=24, do_sample=False).sequences
    assert torch.equal(text, model.generate(prompt, max_new_tokens=24, do_sample=False))
