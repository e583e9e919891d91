"""The targets that other tests stand on: random, but neither constant nor forgetful."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import transformers
from packaging.version import Version

from tests.tiny_targets import (
    CORE_FAMILIES,
    FAMILIES,
    LEFT_OUT,
    MOE_FAMILIES,
    SLIDING_WINDOW,
    attention_implementations,
    random_prompt,
    tiny_target,
)


def is_periodic(tokens: Sequence[int], longest: int = 20) -> bool:
    """Whether the text repeats one passage of at most `longest` tokens."""
    return any(tokens[period:] == tokens[:-period] for period in range(1, longest + 1))


@pytest.mark.parametrize(
    ("family", "weights"), [*((family, 0.3) for family in FAMILIES), *((family, 0.5) for family in CORE_FAMILIES)]
)
def test_greedy_text_keeps_changing_and_depends_on_the_prompt(family: str, weights: float) -> None:
    target = tiny_target(family, initializer_range=weights)
    prompts = random_prompt(2 * SLIDING_WINDOW, batch_size=2)
    output = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=60, do_sample=False)
    first, second = output[:, prompts.shape[1] :].tolist()
    assert len(set(first)) > 15
    assert not is_periodic(first[20:])
    assert first != second


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_shared_shape_and_its_own_attention(family: str) -> None:
    assert set(CORE_FAMILIES) | set(MOE_FAMILIES) <= set(FAMILIES)
    for attention in attention_implementations(family):
        target = tiny_target(family, attn_implementation=attention, initializer_range=0.1)
        config = target.config
        assert config._attn_implementation == attention
        assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (32, 6, 128)
        assert config.eos_token_id is None
        assert target.get_input_embeddings().weight.std().item() == pytest.approx(0.1, rel=0.1)
        assert not torch.equal(target.get_input_embeddings().weight, target.get_output_embeddings().weight)


def test_only_two_families_are_left_out_and_on_old_releases_only() -> None:
    assert set(LEFT_OUT) <= {"olmo2", "cohere2"}
    assert not LEFT_OUT or Version(transformers.__version__) < Version("5.23")
    assert not set(LEFT_OUT) & set(FAMILIES)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(3)
    one = tiny_target("llama", seed=1)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    same, other = torch.rand(1), tiny_target("llama", seed=2)
    assert torch.equal(drawn, same), "building a target must not change torch's generator"
    again = tiny_target("llama", seed=1)
    assert torch.equal(one.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
