"""EAGLE-3 against a reference that loops over slots and steps, its alignment, its vocabulary and its positions.

Legend: B batch, T sequence length, K unroll steps, D hidden size.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads import create_heads
from draftsmith.heads.kinds.eagle3 import Eagle3Heads, default_feature_layers
from draftsmith.inference import Target
from tests.heads.kinds import slow_layer
from tests.heads.kinds.slow_layer import norm
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt, tiny_target

eagle3 = partial(tiny_heads, "eagle3")


def test_feature_layers_are_three_distinct_ones_in_order() -> None:
    for num_layers in range(2, 41):
        low, middle, high = default_feature_layers(num_layers)
        assert 0 <= low < middle < high <= num_layers
        if num_layers >= 7:
            assert [low, middle, high] == [2, num_layers // 2, num_layers - 3]


def unroll_slowly(heads: Eagle3Heads, features: Tensor, token_ids: list[int]) -> list[list[Tensor]]:
    """[K][T'] outputs, those that are fed to the next step, for one sequence: one slot and one step at a time, straight
    from section 3 of the paper. A slot whose token x_{t+k+1} does not exist has no output from step k on."""
    config, weights = heads.config, heads.state_dict()
    layer, eps = slow_layer.layer_weights(weights, "midlayer."), config.rms_norm_eps
    table = weights.get("embed_tokens.weight", heads.target.embed_tokens.weight)
    length, size = len(token_ids), heads.target.hidden_size
    g = []
    for t in range(length):
        parts = [features[t, i * size : (i + 1) * size] for i in range(len(config.feature_layers))]
        if config.fc_norm:
            parts = [norm(part, weights[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)]
        joined = torch.cat(parts)
        if config.norm_before_fc:
            joined = norm(joined, weights["input_norm.weight"], eps)
        g.append(weights["fc.weight"] @ joined)
    inputs: list[list[Tensor]] = []
    outputs: list[list[Tensor]] = []
    for k in range(config.ttt_steps):
        inputs.append([])
        outputs.append([])
        for t in range(length - k - 1):
            token = norm(table[token_ids[t + k + 1]], layer["input_layernorm.weight"], eps)
            normed = norm(g[t], layer["hidden_norm.weight"], eps)
            inputs[k].append(torch.cat([token, normed]))
            seen = [(0, j) for j in range(t + 1)] + [(m, t) for m in range(1, k + 1)]
            attended = slow_layer.attend(layer, config, [inputs[m][j] for m, j in seen], [j + m for m, j in seen])
            residual = normed if config.norm_before_residual else g[t]
            output = slow_layer.finish(layer, config, residual + attended)
            outputs[k].append(norm(output, weights["norm.weight"], eps) if config.norm_output else output)
        g = outputs[k]
    return outputs


@torch.no_grad()
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("fc_norm",),
        ("norm_output",),
        ("fc_norm", "norm_output"),
        ("norm_before_residual", "norm_before_fc", "norm_output"),
        ("qkv_bias", "o_bias", "own_embedding"),
    ],
    ids="+".join,
)
def test_unroll_equals_the_slow_reference(target: Target, flags: tuple[str, ...]) -> None:
    heads = eagle3(target, ttt_steps=4, **dict.fromkeys(flags, True))
    weights = heads.state_dict()
    for step, found, expected in slow_layer.unroll_both(heads, unroll_slowly):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        if not heads.config.norm_output:
            expected = norm(expected, weights["norm.weight"], heads.config.rms_norm_eps)
        scores = expected @ weights["lm_head.weight"].T
        torch.testing.assert_close(step.head(found), scores, rtol=1e-4, atol=1e-4)


class TestVocabulary:
    def test_is_chosen_by_frequency_and_starts_from_the_targets_rows(self, target: Target) -> None:
        heads = create_heads("eagle3", target, draft_vocab_size=3)
        assert heads.wants_token_counts
        counts = torch.zeros(128, dtype=torch.long)
        counts[[7, 100, 20, 5]] = torch.tensor([3, 9, 4, 1])
        heads.fit_vocabulary(counts)
        assert not heads.wants_token_counts
        assert heads.draft_token_ids.tolist() == [7, 20, 100]
        assert heads.d2t.tolist() == [7, 19, 98]
        assert heads.t2d.nonzero().flatten().tolist() == [7, 20, 100]
        assert torch.equal(heads.lm_head.weight, target.lm_head.weight[[7, 20, 100]])

    def test_all_of_the_targets_needs_no_map(self, target: Target) -> None:
        for size in (None, 128):
            heads = create_heads("eagle3", target, draft_vocab_size=size)
            assert heads.draft_token_ids is None
            assert not heads.wants_token_counts
            assert not [name for name in heads.state_dict() if name in ("d2t", "t2d")]
            assert torch.equal(heads.lm_head.weight, target.lm_head.weight)
            assert heads.lm_head.weight.data_ptr() != target.lm_head.weight.data_ptr()


class TestPositions:
    @torch.no_grad()
    @pytest.mark.parametrize("rope", [None, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}])
    def test_drafting_goes_on_beyond_the_configs_limit(self, rope: dict[str, Any] | None) -> None:
        """`max_position_embeddings` (64 here, 2048 in many published heads) is no table's size: nothing ends there."""
        if rope is not None:
            rope = {**rope, "original_max_position_embeddings": 32}
        target = Target(tiny_target("llama", max_position_embeddings=64, rope_parameters=rope))
        heads = eagle3(target, ttt_steps=2)
        assert heads.config.max_position_embeddings == 64
        length = 2101
        input_ids, features = random_prompt(length), torch.randn(1, length, 96)
        state = heads.start(1, length, 4)
        count = torch.tensor([length - 2])
        draft = heads.extend(state, features[:, : length - 2], input_ids[:, 1:-1], count, max_slots=length - 2)
        first, second = heads.unroll(features, input_ids)
        torch.testing.assert_close(draft.logits[0, 0], first.head(first.hidden[0, -3]), rtol=1e-3, atol=1e-3)
        below = heads.expand(state, input_ids[:, -1:], torch.zeros(1, 1, dtype=torch.long), 1)
        torch.testing.assert_close(below.logits[0, 0], second.head(second.hidden[0, -3]), rtol=1e-3, atol=1e-3)
