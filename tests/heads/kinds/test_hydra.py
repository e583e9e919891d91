"""Hydra against a reference that loops over slots and heads, its alignment, how it starts, and its settings.

Legend: B batch, T sequence length, K heads, D hidden size.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from heads import create_heads
from heads import hydra as hydra_module
from heads.hydra import HydraConfig, HydraHeads
from heads.modules import layers as layers_module
from inference import Target
from inference.targets.encoding import encode
from tests.heads.kinds import slow_layer
from tests.heads.kinds.slow_layer import norm
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt, tiny_target

hydra = partial(tiny_heads, "hydra")

PLAIN: dict[str, Any] = {"num_layers": 2}
PLUS: dict[str, Any] = {"num_layers": 3, "use_prefix_attention": True}
both = pytest.mark.parametrize("overrides", [PLAIN, PLUS], ids=["hydra", "hydra++"])


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
    table: Tensor = heads.target.embed_tokens.weight  # type: ignore[assignment]
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
    return weights[f"lm_head.{0 if config.tie_lm_head else i}.weight"] @ x


VARIANTS = {
    "hydra": PLAIN,
    "as the authors do": {"num_layers": 1, "use_embedding_norm": False},
    "one LM head": {"tie_lm_head": True, "num_heads": 3},
    "hydra++": PLUS,
}


@torch.no_grad()
@pytest.mark.parametrize("query_chunk", [256, 3])
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_unroll_equals_the_slow_reference(
    target: Target, overrides: dict[str, Any], query_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_module, "QUERY_CHUNK", query_chunk)
    heads = hydra(target, **overrides)
    input_ids, features = random_prompt(9, batch_size=2), torch.randn(2, 9, 32)
    steps = heads.unroll(features, input_ids)
    for row, ids in enumerate(input_ids.tolist()):
        hidden = attend_slowly(heads, features[row]) if heads.config.use_prefix_attention else list(features[row])
        for i, step in enumerate(steps):
            assert step.shift == 2 + i
            for t in range(9 - step.shift):
                expected = score_slowly(heads, hidden[t], ids[t + 1 : t + 2 + i])
                torch.testing.assert_close(step.head(step.hidden[row, t]), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@both
@pytest.mark.parametrize("chunk", [512, 4])
def test_every_node_of_a_full_tree_is_scored_by_its_own_path(
    target: Target, overrides: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hydra_module, "EXTEND_CHUNK", chunk)
    heads = hydra(target, num_heads=4, **overrides)
    features, next_ids = torch.randn(1, 7, 32), random_prompt(7)
    hidden = attend_slowly(heads, features[0])[-1] if heads.config.use_prefix_attention else features[0, -1]
    root = int(next_ids[0, -1])
    state = heads.start(1, 16, 2 + 4 + 8)
    found = heads.extend(state, features, next_ids, torch.tensor([7]), max_slots=7).logits
    torch.testing.assert_close(found[0, 0], score_slowly(heads, hidden, [root]), rtol=1e-4, atol=1e-4)
    for depth in (1, 2, 3):  # each node has two children, of tokens 2 * depth and 2 * depth + 1
        paths = list(itertools.product(*((2 * d, 2 * d + 1) for d in range(1, depth + 1))))
        ids = torch.tensor([[path[-1] for path in paths]])
        parents = torch.tensor([[index // 2 if depth > 1 else 0 for index in range(len(paths))]])
        found = heads.expand(state, ids, parents, depth).logits
        assert found.shape == (1, 2**depth, 128)
        for node, path in enumerate(paths):
            expected = score_slowly(heads, hidden, [root, *path])
            torch.testing.assert_close(found[0, node], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@both
def test_levels_are_traced_whole_and_take_their_own_head(target: Target, overrides: dict[str, Any]) -> None:
    """One graph per level, without a break; a second tree makes no more."""
    heads = hydra(target, num_heads=4, **overrides)
    num_graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        num_graphs.append(1)
        return graph.forward

    def draft(extend: Any, expand: Any) -> list[Tensor]:
        """Scores of the levels of two trees; the prompt is taken in as it is in decoding, eagerly."""
        state = heads.start(2, 64, 12)
        heads.extend(state, features, next_ids, torch.tensor([5, 3]), max_slots=20)
        scores = []
        for counts in ([2, 5], [4, 1]):
            scores.append(extend(state, features, next_ids, torch.tensor(counts), max_slots=20).logits)
            for depth in (1, 2, 3):
                parents = torch.tensor([[0, 1, 1, 0], [3, 2, 0, 1]]) * (depth > 1)
                scores.append(expand(state, random_prompt(4, batch_size=2, seed=depth), parents, depth).logits)
        return scores

    features, next_ids = torch.randn(2, 5, 32), random_prompt(5, batch_size=2)
    torch._dynamo.reset()
    with torch.inference_mode():
        traced = draft(*(torch.compile(each, backend=count, fullgraph=True) for each in (heads.extend, heads.expand)))
        for one, other in zip(traced, draft(heads.extend, heads.expand), strict=True):
            torch.testing.assert_close(one, other)
    torch._dynamo.reset()
    assert len(num_graphs) == 4


@both
def test_untrained_heads_repeat_the_lm_head(overrides: dict[str, Any]) -> None:
    model: Any = tiny_target("gemma3")
    target = Target(model)
    heads = create_heads("hydra", target, **overrides)
    input_ids = random_prompt(9)
    encoded = encode(target, input_ids, torch.ones_like(input_ids), feature_layers=heads.feature_layers)
    assert heads.feature_layers == (6,)
    expected = model(input_ids).logits
    for step in heads.unroll(encoded.features, input_ids):
        torch.testing.assert_close(step.head(step.hidden), expected, rtol=1e-4, atol=1e-4)


class TestSettings:
    def test_the_loss_is_the_papers(self, target: Target) -> None:
        assert create_heads("hydra", target).default_loss == "cross_entropy"
        assert create_heads("hydra", target, **PLUS).default_loss == "distillation"

    def test_one_lm_head_for_all(self, target: Target) -> None:
        own, tied = (create_heads("hydra", target, num_heads=4, tie_lm_head=flag) for flag in (False, True))
        counts = [sum(parameter.numel() for parameter in heads.parameters()) for heads in (own, tied)]
        assert counts[0] - counts[1] == 3 * 128 * 32
        assert [name for name in tied.state_dict() if name.startswith("lm_head")] == ["lm_head.0.weight"]
        for heads in (own, tied):
            for lm_head in heads.lm_head:
                assert torch.equal(lm_head.weight, target.lm_head.weight)

    def test_the_prefix_layer_has_the_targets_shape(self, target: Target) -> None:
        heads: Any = create_heads("hydra", target, **PLUS)
        assert heads.prefix.mlp.up_proj.weight.shape == (target.text_config.intermediate_size, 32)
        assert heads.prefix.self_attn.num_groups == target.text_config.num_key_value_heads
        smaller: Any = create_heads("hydra", target, **PLUS, intermediate_size=48)
        assert smaller.prefix.mlp.up_proj.weight.shape == (48, 32)

    def test_dropout_is_for_training(self, target: Target) -> None:
        heads = hydra(target, dropout=0.5)
        features, input_ids = torch.randn(1, 6, 32), random_prompt(6)
        plain = hydra(target).unroll(features, input_ids)
        for step, expected in zip(heads.eval().unroll(features, input_ids), plain, strict=True):
            assert torch.equal(step.hidden, expected.hidden)
        for step, expected in zip(heads.train().unroll(features, input_ids), plain, strict=True):
            assert not torch.allclose(step.hidden, expected.hidden)

    def test_a_config_without_a_target(self) -> None:
        assert HydraConfig(use_prefix_attention=True, head_dim=32).head_dim == 32
        assert not hasattr(HydraConfig(), "head_dim")
