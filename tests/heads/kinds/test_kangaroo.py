"""Kangaroo against a reference that runs the target plainly over each path, its second exit, and its rows in the cache.

Legend: B batch, T sequence length, D hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads import create_heads
from draftsmith.heads.kinds.kangaroo import KangarooHeads
from draftsmith.inference import Target
from draftsmith.training.features.encoding import encode
from tests.heads.kinds import slow_layer
from tests.heads.kinds.slow_layer import norm
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt, target_of, tiny_target

kangaroo = partial(tiny_heads, "kangaroo")


@torch.no_grad()
def score_slowly(heads: KangarooHeads, token_ids: list[int]) -> Tensor:
    """[T, V] scores of the token after each position: the target's own hidden states of these very tokens, then the
    adapter one position at a time (section 3.1)."""
    config, weights = heads.config, heads.state_dict()
    model = heads.target.model
    states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[config.exit_layer][0]
    layer, eps = slow_layer.layer_weights(weights, "adapter."), config.rms_norm_eps
    inputs = [norm(x, layer["input_layernorm.weight"], eps) for x in states]
    outputs = []
    for t, x in enumerate(states):
        hidden = x + slow_layer.attend(layer, config, inputs[: t + 1], list(range(t + 1)))
        outputs.append(heads.target.compute_logits(norm(hidden, weights["norm.weight"], eps)))
    return torch.stack(outputs)


class TestParameters:
    def test_an_adapter_that_adds_nothing_reads_out_the_exit_layer(self) -> None:
        """Norm and LM head start as the target's."""
        for family in ("llama", "gemma3"):
            model: Any = tiny_target(family)
            with torch.no_grad():
                model.model.norm.weight.uniform_(0.5, 2.0)
            target = Target(model)
            heads = create_heads("kangaroo", target, exit_layer=3)
            with torch.no_grad():
                heads.adapter.self_attn.o_proj.weight.zero_()
                features = torch.randn(1, 4, 32)
                step = heads.unroll(features, random_prompt(4))[0]
                expected = target.compute_logits(model.model.norm(features[:, 1:]))
                torch.testing.assert_close(step.head(step.hidden)[:, :-1], expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("overrides", [{}, {"exit_layer": 4, "num_key_value_heads": 4}], ids=str)
def test_unroll_equals_the_slow_reference(target: Target, overrides: dict[str, Any]) -> None:
    heads = kangaroo(target, **overrides)
    input_ids = random_prompt(9, batch_size=2)
    encoded = encode(target, input_ids, torch.ones_like(input_ids), feature_layers=heads.feature_layers)
    (step,) = heads.unroll(encoded.features, input_ids)
    assert step.shift == 2
    for row in range(2):
        expected = score_slowly(heads, input_ids[row].tolist())
        torch.testing.assert_close(step.head(step.hidden[row, :-1]), expected[1:], rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(("family", "attn_implementation"), [("mistral", "sdpa"), ("gemma3", "eager")])
def test_drafts_equal_plain_passes_over_each_path(family: str, attn_implementation: str) -> None:
    """Rows of different lengths, longer than the window of 8; four layers hold every kind of attention."""
    target = target_of(family, attn_implementation=attn_implementation)
    heads = kangaroo(target, exit_layer=4)
    token_ids, lengths = random_prompt(15, batch_size=2), torch.tensor([14, 10])  # of the prompt, without the root
    cache = target.new_cache(2, 32)
    state = heads.start(2, 32, 6)
    heads.share_cache(state, cache)
    features = target.prefill(cache, token_ids[:, :14], lengths, feature_layers=heads.feature_layers).features
    roots = [token_ids[row, : int(lengths[row]) + 1].tolist() for row in range(2)]
    draft = heads.extend(state, features, token_ids[:, 1:], lengths, max_slots=14)
    levels = [
        (torch.tensor([[3, 5], [7, 9]]), torch.tensor([[0, 0], [0, 0]])),
        (torch.tensor([[4, 6, 8], [2, 2, 3]]), torch.tensor([[1, 1, 0], [0, 1, 1]])),
        (torch.tensor([[11], [12]]), torch.tensor([[2], [1]])),
    ]
    paths = [[root] for root in roots]
    found = draft.logits
    for depth in range(len(levels) + 1):
        for row in range(2):
            for node, path in enumerate(paths[row]):
                expected = score_slowly(heads, path)[-1]
                torch.testing.assert_close(found[row, node], expected, rtol=1e-3, atol=1e-3)
        if depth < len(levels):
            ids, parents = levels[depth]
            found = heads.expand(state, ids, parents, depth + 1).logits
            paths = [
                [[*paths[row][above], token] for token, above in zip(ids[row].tolist(), parents[row], strict=True)]
                for row in range(2)
            ]
