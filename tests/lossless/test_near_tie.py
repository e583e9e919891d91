"""What counts as a near-tie, of logits and of expert routers, and that nothing else is excused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.inference import generate
from tests.lossless.near_tie import assert_same_text, explain_difference, picking_scores
from tests.params import slow_but
from tests.tiny_targets import random_prompt, tiny_target

_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
# Softmax probabilities, logits, and sigmoids with a bias and groups of experts.
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 4, "norm_topk_prob": True},
    "qwen3_moe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "_attn_implementation": "eager"},
    "deepseek_v3": {
        "head_dim": 4,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}


@torch.no_grad()
def last_logits(model: Any, text: Tensor) -> Tensor:
    logits: Tensor = model(text[None], use_cache=False).logits[0, -1]
    return logits


@cache
def tied_router(kind: str) -> tuple[Any, Tensor, int, int]:
    """A model, a text, and the tokens it says before and after one router weight moves by float32 rounding.

    The weights of one expert are moved along the router's input for the last token until a bisection, which looks at
    nothing but the model's logits, stands at a jump of them.
    """
    fields = _SHAPE | ROUTERS[kind]
    config = AutoConfig.for_model(kind, **{name: value for name, value in fields.items() if name[0] != "_"})
    config._attn_implementation = fields.get("_attn_implementation", "sdpa")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    name = f"model.layers.1.mlp.{'router' if kind == 'gpt_oss' else 'gate'}"
    router = model.get_submodule(name)
    weight = model.get_parameter(f"{name}.weight")
    inputs: list[Tensor] = []
    router.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for seed in range(20):
        text, before = random_prompt(6, seed=seed, vocab_size=64)[0], weight.detach().clone()
        expert = seed % weight.shape[0]
        last_logits(model, text)
        towards = inputs[-1].reshape(-1, weight.shape[1])[-1]

        def at(step: float, before: Tensor = before, expert: int = expert, towards: Tensor = towards) -> Tensor:
            with torch.no_grad():
                weight.copy_(before)
                weight[expert] += step * towards / towards.norm() ** 2
            return last_logits(model, text)  # noqa: B023

        low, high = 0.0, 30.0
        below, above = at(low), at(high)
        for _ in range(40):
            middle = (low + high) / 2
            here = at(middle)
            if (here - below).norm() < (here - above).norm():
                low, below = middle, here
            else:
                high, above = middle, here
        if below.argmax() != above.argmax() and (below - above).abs().max() > 0.5:
            at(low)
            return model, text, int(below.argmax()), int(above.argmax())
        with torch.no_grad():
            weight.copy_(before)
    raise AssertionError("no text was found whose next token depends on one choice of experts")


def join(text: Tensor, token: int) -> Tensor:
    return torch.cat([text, torch.tensor([token])])


@pytest.mark.parametrize("kind", slow_but({"deepseek_v3"}, list(ROUTERS)))
def test_a_near_tie_of_experts_is_shown(kind: str) -> None:
    model, text, expected, got = tied_router(kind)
    for pair in ((expected, got), (got, expected)):  # whichever side took the other way
        ties = assert_same_text(model, join(text, pair[0])[None], join(text, pair[1])[None])
        assert "expert" in ties[0]
        assert "with the latter taken" in ties[0]


@pytest.mark.parametrize("kind", ROUTERS)
def test_near_ties_of_experts_excuse_no_other_token(kind: str) -> None:
    model, text, expected, got = tied_router(kind)
    other = next(token for token in range(2, 64) if token not in (expected, got))
    for pair in ((expected, other), (other, got)):
        with pytest.raises(AssertionError, match="position 6"):
            assert_same_text(model, join(text, pair[0])[None], join(text, pair[1])[None])


def test_a_margin_beyond_rounding_is_none() -> None:
    model, text, expected, got = tied_router("mixtral")
    difference = explain_difference(model, join(text, expected), join(text, got), router_tolerance=1e-12)
    assert difference is not None
    assert difference[1] > 1e-3, "the gap of the logits"


def tied_logits() -> tuple[Any, Tensor, int, int]:
    """The best token and another one, whose rows of the LM head are nearly the same."""
    model: Any = tiny_target("llama")
    text = random_prompt(5)[0]
    best = int(last_logits(model, text).argmax())
    with torch.no_grad():
        model.lm_head.weight[best - 1] = model.lm_head.weight[best] * (1 - 1e-6)
    return model, text, best, best - 1


def test_a_near_tie_of_logits_is_shown() -> None:
    model, text, best, second = tied_logits()
    ties = assert_same_text(model, join(text, best)[None], join(text, second)[None])
    assert f"token {best} has score" in ties[0]
    assert assert_same_text(model, text[None], text[None]) == []


def test_two_low_tokens_that_score_alike_are_no_near_tie() -> None:
    model, text, best, _ = tied_logits()
    low, other = 3, 4
    assert best not in (low, other)
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[low]
    with pytest.raises(AssertionError, match=f"token {best} has"):
        assert_same_text(model, join(text, low)[None], join(text, other)[None])


def test_another_token_and_another_length_are_bugs() -> None:
    model, text, best, second = tied_logits()
    other = next(token for token in range(2, 64) if token not in (best, second))
    with pytest.raises(AssertionError, match="position 5"):
        assert_same_text(model, join(text, best)[None], join(text, other)[None])
    with pytest.raises(AssertionError, match="one text ends at 5"):
        assert_same_text(model, join(text, best)[None], text[None])


@pytest.mark.parametrize("options", [{"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("seed", [None, 7])
def test_picking_scores_pick_what_plain_decoding_emits(options: dict[str, float], seed: int | None) -> None:
    model = tiny_target("llama", initializer_range=0.3)
    if seed is None:
        options = {name: value for name, value in options.items() if name == "repetition_penalty"}
    settings: dict[str, Any] = {"do_sample": seed is not None, "max_new_tokens": 12, **options}
    text = generate(model, None, random_prompt(5), seed=None if seed is None else [seed], **settings).sequences[0]
    scores = picking_scores(model, seed, **settings)
    for length in range(5, 17):
        assert scores(last_logits(model, text[:length]), text[:length]).argmax() == text[length]
