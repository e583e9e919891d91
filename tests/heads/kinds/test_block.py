"""Block drafters against transformers' DFlash and a reference that loops over rows, their switches, and what they see.

Legend: B batch, T sequence length, N block size, K depths, D hidden size.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads.kinds.block import BlockHeads, default_loss_decay, spaced_feature_layers
from draftsmith.heads.modules import block_view as view_module
from draftsmith.inference import Target
from draftsmith.training.features.encoding import encode
from draftsmith.training.losses.draft_loss import draft_loss
from draftsmith.training.losses.teacher import compute_teacher
from tests.heads.kinds import slow_layer
from tests.heads.kinds.slow_layer import norm, turn
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt

block = partial(tiny_heads, "block")
SWITCHES: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 4},
    "anchor": {"block_size": 3, "predicts_at_anchor": True},
    "markov": {"block_size": 4, "markov_rank": 5},
    "causal": {"block_size": 4, "is_causal": True, "num_layers": 3, "num_key_value_heads": 4},
    "dspark": {"block_size": 3, "predicts_at_anchor": True, "markov_rank": 5, "has_confidence": True},
}
every_switch = pytest.mark.parametrize("overrides", SWITCHES.values(), ids=SWITCHES)


class TestTransformers:
    """`MuseGlimmerAssistantModel` is what transformers drafts with under `speculation_type="dflash"`."""

    @torch.no_grad()
    def test_same_weights_give_the_same_states_and_logits(self, target: Target) -> None:
        module = pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="this release has no DFlash")
        heads = block(target, block_size=5, num_layers=2)
        config = heads.config
        theirs = module.MuseGlimmerAssistantModel(
            module.MuseGlimmerAssistantConfig(
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=2,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters=config.rope_parameters,
                layer_types=["full_attention"] * 2,
                block_size=5,
                target_layer_ids=[layer - 1 for layer in config.feature_layers],
            )
        ).eval()
        renamed = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc", "mask_embedding": None}
        weights = {}
        for name, tensor in heads.state_dict().items():
            first, _, rest = name.partition(".")
            if (new := renamed.get(first, first)) is not None:
                weights[f"{new}.{rest}"] = tensor
        theirs.load_state_dict(weights)

        input_ids, features = random_prompt(9), torch.randn(1, 9, 3 * 32)
        steps = heads.unroll(features, input_ids)
        for slot in (0, 3, 7):
            noise = torch.cat([heads.embed(input_ids[:, slot + 1])[:, None], heads.mask_embedding.expand(1, 4, -1)], 1)
            found = theirs(noise_embeds=noise, context_hidden_states=features[:, : slot + 1]).last_hidden_state
            expected = torch.stack([step.hidden[:, slot] for step in steps], dim=1)
            torch.testing.assert_close(found[:, 1:], expected, rtol=1e-4, atol=1e-4)
            state = heads.start(1, 16, 8)
            draft = heads.extend(
                state, features[:, : slot + 1], input_ids[:, 1 : slot + 2], torch.tensor([slot + 1]), max_slots=slot + 1
            )
            torch.testing.assert_close(draft.logits, target.lm_head(found[:, 1:2]), rtol=1e-4, atol=1e-4)


def draft_slowly(heads: BlockHeads, features: Tensor, token_ids: list[int], slot: int) -> tuple[list[Tensor], Tensor]:
    """[K][V] logits and [K] confidences after one slot: one row of the block at a time, as in the papers' equations.
    The Markov bias reads the tokens of `token_ids`."""
    config, weights = heads.config, heads.state_dict()
    table: Tensor = heads.target.embed_tokens.weight  # type: ignore[assignment]
    size, eps, theta = config.head_dim, config.rms_norm_eps, config.rope_parameters["rope_theta"]
    repeats = config.num_attention_heads // config.num_key_value_heads
    context = [norm(weights["fc.weight"] @ features[t], weights["hidden_norm.weight"], eps) for t in range(slot + 1)]
    hidden = [table[token_ids[slot + 1]]] + [weights["mask_embedding"]] * (config.block_size - 1)
    for layer in range(config.num_layers):
        weight = slow_layer.layer_weights(weights, f"layers.{layer}.")
        normed = [norm(x, weight["input_layernorm.weight"], eps) for x in hidden]
        keys, values = [], []
        for position, x in enumerate([*context, *normed]):
            key = norm((weight["self_attn.k_proj.weight"] @ x).view(-1, size), weight["self_attn.k_norm.weight"], eps)
            keys.append(turn(key, position, theta).repeat_interleave(repeats, 0))
            values.append((weight["self_attn.v_proj.weight"] @ x).view(-1, size).repeat_interleave(repeats, 0))
        outputs = []
        for row, x in enumerate(normed):
            q = norm((weight["self_attn.q_proj.weight"] @ x).view(-1, size), weight["self_attn.q_norm.weight"], eps)
            q = turn(q, slot + 1 + row, theta)
            last = slot + 1 + (row if config.is_causal else config.block_size - 1)
            scores = torch.stack([(q * key).sum(-1) / math.sqrt(size) for key in keys[: last + 1]])
            attended = (scores.softmax(0)[..., None] * torch.stack(values[: last + 1])).sum(0)
            after = hidden[row] + weight["self_attn.o_proj.weight"] @ attended.flatten()
            outputs.append(slow_layer.finish(weight, config, after))
        hidden = outputs
    hidden = [norm(x, weights["norm.weight"], eps) for x in hidden]
    logits, confidences = [], []
    for k, state in enumerate(hidden if config.predicts_at_anchor else hidden[1:]):
        scores = heads.target.lm_head(state)
        if config.markov_rank:
            before = weights["markov.embedding.weight"][token_ids[slot + 1 + k]]
            scores = scores + weights["markov.lm_head.weight"] @ before
            state = torch.cat([state, before])
        logits.append(scores)
        if config.has_confidence:
            confidences.append(weights["confidence.weight"] @ state + weights["confidence.bias"])
    return logits, torch.cat(confidences) if confidences else torch.empty(0)


@torch.no_grad()
@every_switch
@pytest.mark.parametrize("query_chunk", [256, 8])
def test_unroll_equals_the_slow_reference(
    target: Target, overrides: dict[str, Any], query_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "QUERY_CHUNK", query_chunk)
    heads = block(target, **overrides)
    input_ids, features = random_prompt(9, batch_size=2), torch.randn(2, 9, 96)
    steps = heads.unroll(features, input_ids)
    for row in range(2):
        for slot in range(9 - 1 - len(steps)):
            logits, confidences = draft_slowly(heads, features[row], input_ids[row].tolist(), slot)
            for k, (step, expected) in enumerate(zip(steps, logits, strict=True)):
                torch.testing.assert_close(step.head(step.hidden[row, slot]), expected, rtol=1e-4, atol=1e-4)
                if step.confidence is not None:
                    torch.testing.assert_close(step.confidence[row, slot], confidences[k], rtol=1e-4, atol=1e-4)


class TestTrainingSlots:
    def test_are_those_with_a_loss(self, target: Target) -> None:
        heads = block(target, block_size=3)
        input_ids, features = random_prompt(9), torch.randn(1, 9, 96)
        loss_mask = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 1, 0]])
        steps, every = heads.unroll_where(features, input_ids, loss_mask), heads.unroll(features, input_ids)
        for step, full in zip(steps, every, strict=True):
            assert step.slots is not None
            assert sorted(step.slots[0].tolist()) == [1, 2, 5]
            assert full.slots is None
            torch.testing.assert_close(step.hidden, full.hidden[:, step.slots[0]])

    def test_without_any_every_parameter_still_has_a_gradient(self, target: Target) -> None:
        heads = block(target, **SWITCHES["dspark"]).train()
        input_ids = random_prompt(9)
        mask = torch.zeros_like(input_ids)
        encoded = encode(target, input_ids, torch.ones_like(input_ids), feature_layers=heads.feature_layers)
        loss_type = "1.8*total_variation+0.1*cross_entropy"
        teacher = compute_teacher(target, encoded.last_hidden, input_ids, mask, None, loss_type=loss_type)
        steps = heads.unroll_where(encoded.features, input_ids, mask)
        loss = draft_loss(steps, teacher, mask, loss_type=loss_type, step_decay=0.8).loss
        assert loss.item() == 0
        loss.backward()
        trained = {name: weight for name, weight in heads.named_parameters() if weight.requires_grad}
        for name, parameter in trained.items():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() == 0, name


class TestSettings:
    def test_the_worked_examples(self) -> None:
        assert spaced_feature_layers(36) == [2, 10, 18, 26, 34]
        assert spaced_feature_layers(16) == [2, 5, 8, 11, 14]
        assert spaced_feature_layers(6) == [2, 3, 4]
        assert default_loss_decay(16) == 7.0
