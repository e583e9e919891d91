"""Hydra against a reference that loops over slots and heads, and its alignment.

Legend: B batch, T sequence length, K heads, D hidden size.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.heads.kinds.hydra import HydraHeads
from draftsmith.inference import Target
from tests.heads.kinds import slow_layer
from tests.heads.kinds.slow_layer import norm
from tests.heads.tiny_heads import tiny_heads

hydra = partial(tiny_heads, "hydra")

PLAIN: dict[str, Any] = {"num_layers": 2}
PLUS: dict[str, Any] = {"num_layers": 3, "use_prefix_attention": True}


def attend_slowly(heads: HydraHeads, features: Tensor) -> list[Tensor]:
    """The prefix layer's outputs for the states [T, D] of one sequence, one query after the other."""
    config, layer = heads.config, slow_layer.layer_weights(heads.state_dict(), "prefix.")
    inputs = [norm(h, layer["input_layernorm.weight"], config.rms_norm_eps) for h in features]
    return [
        slow_layer.finish(layer, config, h + slow_layer.attend(layer, config, inputs[: t + 1], list(range(t + 1))))
        for t, h in enumerate(features)
    ]


def score_slowly(heads: HydraHeads, hidden: Tensor, token_ids: list[int]) -> Tensor:
    """Head len(token_ids) - 1's scores after these tokens, by the definition."""
    config, weights = heads.config, heads.state_dict()
    table = heads.target.embed_tokens.weight
    i = len(token_ids) - 1
    embedded = [table[token] for token in token_ids]
    if config.use_embedding_norm:
        embedded = [norm(x, weights["embedding_norm.weight"], config.rms_norm_eps) for x in embedded]
    x = torch.cat([hidden, *embedded])
    # A head's parts are a dropout, and a block and a dropout per layer.
    w, b = (weights[f"mlps.{i}.1.linear.{name}"] for name in ("weight", "bias"))
    x = weights[f"mlps.{i}.1.residual.weight"] @ x + F.silu(w @ x + b)
    for layer in range(1, config.num_layers):
        w, b = (weights[f"mlps.{i}.{2 * layer + 1}.linear.{name}"] for name in ("weight", "bias"))
        x = x + F.silu(w @ x + b)
    return weights[f"lm_head.{i}.weight"] @ x


def unroll_slowly(heads: HydraHeads, features: Tensor, token_ids: list[int]) -> list[list[Tensor]]:
    """[K][T'] scores of one sequence."""
    hidden = attend_slowly(heads, features) if heads.config.use_prefix_attention else features
    return [
        [score_slowly(heads, hidden[t], token_ids[t + 1 : t + 2 + i]) for t in range(len(token_ids) - 2 - i)]
        for i in range(heads.config.num_heads)
    ]


VARIANTS = {"hydra": PLAIN, "as the authors do": {"num_layers": 1, "use_embedding_norm": False}, "hydra++": PLUS}


@torch.no_grad()
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_unroll_equals_the_slow_reference(target: Target, overrides: dict[str, Any]) -> None:
    for step, states, scores in slow_layer.unroll_both(hydra(target, **overrides), unroll_slowly):
        torch.testing.assert_close(step.head(states), scores, rtol=1e-4, atol=1e-4)
