"""MTP against a reference that loops over slots and depths, and what it borrows of the target.

Legend: B batch, T sequence length, K depths, D hidden size.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads import create_heads
from draftsmith.heads.kinds.mtp import MTPHeads
from draftsmith.inference import Target
from tests.heads.kinds import slow_layer
from tests.heads.kinds.slow_layer import norm
from tests.heads.tiny_heads import tiny_heads

mtp = partial(tiny_heads, "mtp")


def unroll_slowly(heads: MTPHeads, features: Tensor, token_ids: list[int]) -> list[list[Tensor]]:
    """[K][T'] logits of one sequence, one slot and one depth at a time. A slot whose token x_{t+d+1} does not exist has
    none from depth d on."""
    config, weights = heads.config, heads.state_dict()
    table = heads.target.embed_tokens.weight
    eps = config.rms_norm_eps
    states = list(features)
    inputs: list[list[Tensor]] = []
    logits: list[list[Tensor]] = []
    for d in range(config.num_steps):
        block = f"blocks.{0 if config.share_block else d}"
        layer = slow_layer.layer_weights(weights, f"{block}.layer.")
        outputs: list[Tensor] = []
        inputs.append([])
        logits.append([])
        for t in range(len(token_ids) - d - 1):
            token = table[token_ids[t + d + 1]]
            if config.zero_first_embedding and t + d == 0:
                token = torch.zeros_like(token)
            pair = [norm(token, weights[f"{block}.enorm.weight"], eps)]
            pair.append(norm(states[t], weights[f"{block}.hnorm.weight"], eps))
            x = weights[f"{block}.eh_proj.weight"] @ torch.cat(pair[::-1] if config.hidden_first else pair)
            inputs[d].append(norm(x, layer["input_layernorm.weight"], eps))
            if config.share_block:
                seen = [(0, j) for j in range(t + 1)] + [(m, t) for m in range(1, d + 1)]
            else:
                seen = [(d, j) for j in range(t + 1)]
            attended = slow_layer.attend(layer, config, [inputs[m][j] for m, j in seen], [j + m for m, j in seen])
            x = slow_layer.finish(layer, config, x + attended)
            normed = norm(x, weights[f"{block}.norm.weight"], eps)
            outputs.append(normed if config.norm_output else x)
            logits[d].append(heads.target.lm_head.weight @ normed)
        states = outputs
    return logits


VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_output": False, "hidden_first": True, "zero_first_embedding": True},
    {"share_block": False, "num_steps": 3},
    {"share_block": False, "num_steps": 3, "norm_output": False, "hidden_first": True, "zero_first_embedding": True},
]


@torch.no_grad()
@pytest.mark.parametrize("overrides", VARIANTS, ids=["shared", "shared, as MiMo", "apart", "apart, as MiMo"])
def test_unroll_equals_the_slow_reference(target: Target, overrides: dict[str, Any]) -> None:
    for step, states, logits in slow_layer.unroll_both(mtp(target, **overrides), unroll_slowly):
        torch.testing.assert_close(step.head(states), logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("hidden_first", [True, False])
def test_the_projection_starts_by_passing_the_state_on(target: Target, hidden_first: bool) -> None:
    block = create_heads("mtp", target, hidden_first=hidden_first).blocks[0]
    state = torch.randn(1, 3, 32)
    torch.testing.assert_close(block.join(state, torch.zeros(1, 3, 32)), block.hnorm(state))
    assert block.join(torch.zeros(1, 3, 32), state).abs().max() > 0
