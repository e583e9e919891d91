"""How new heads start: with the target's final norm and its LM head."""

from typing import Any

import pytest
import torch

from draftsmith.heads import create_heads
from draftsmith.inference import Target
from tests.heads.tiny_heads import encode_for, target_with_gains
from tests.tiny_targets import random_prompt, tiny_target

WITH_NORMS: dict[str, dict[str, Any]] = {
    "block": {},
    "eagle3": {"norm_output": False},
    "kangaroo": {},
    "mtp": {"share_block": False, "num_steps": 2},
    "parallel": {},
}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("kind", WITH_NORMS)
def test_norms_are_the_targets_final_one(kind: str, family: str) -> None:
    """Under a norm of another scale, the LM head would give other scores than the target's own."""
    model, final_norm = target_with_gains(family)
    heads = create_heads(kind, Target(model), **WITH_NORMS[kind])
    hidden = torch.randn(2, 3, 32)
    hidden = hidden - hidden.mean(-1, keepdim=True)
    for part in heads.blocks if kind == "mtp" else [heads]:
        torch.testing.assert_close(part.norm(hidden), final_norm(hidden), rtol=1e-3, atol=1e-3)
    if kind not in ("block", "mtp"):  # the others score states before the norm
        torch.testing.assert_close(heads.score(hidden), model.lm_head(final_norm(hidden)), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "overrides", "family"),
    [
        ("medusa", {}, "qwen2"),
        ("hydra", {"num_layers": 2}, "gemma3"),
        ("hydra", {"num_layers": 3, "use_prefix_attention": True}, "gemma3"),
    ],
)
def test_lm_heads_of_their_own_repeat_the_targets(kind: str, overrides: dict[str, Any], family: str) -> None:
    model: Any = tiny_target(family)
    target, input_ids = Target(model), random_prompt(9)
    heads = create_heads(kind, target, **overrides)
    encoded = encode_for(heads, input_ids)
    assert heads.feature_layers == (6,)
    assert torch.equal(encoded.features, encoded.last_hidden)
    expected = model(input_ids).logits
    for step in heads.unroll(encoded.features, input_ids):
        torch.testing.assert_close(step.head(step.hidden), expected, rtol=1e-4, atol=1e-4)
