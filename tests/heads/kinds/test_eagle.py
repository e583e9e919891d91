"""EAGLE-1 and HASS against a reference in absolute positions, what is borrowed, the noise, and how deep it drafts.

Legend: B batch, T sequence length, K unroll steps, D hidden size.
"""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.heads.kinds.eagle import EagleHeads
from draftsmith.inference import Target
from tests.heads.kinds import slow_layer
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt, tiny_target

eagle = partial(tiny_heads, "eagle")


def unroll_slowly(heads: EagleHeads, features: Tensor, token_ids: list[int]) -> list[list[Tensor]]:
    """[K][T'] outputs, for one sequence, straight from HASS (section 3.2), whose step 0 is EAGLE-1.

    There a step stays at its position p: the last k positions up to p are read with the draft's own features, those
    before with the target's. Slot t of step k here is position p = t + k there.
    """
    config, weights = heads.config, heads.state_dict()
    layer = slow_layer.layer_weights(weights, "layers.0.")
    table = weights.get("embed_tokens.weight", heads.target.embed_tokens.weight)
    bias, scale = weights.get("fc.bias", torch.zeros(1)), config.embedding_scale

    @cache
    def feature(p: int, num_own: int) -> Tensor:
        """Of position p: the target's, or the draft's own at the end of `num_own` steps."""
        return features[p] if num_own == 0 else predict(p - 1, num_own - 1)

    @cache
    def predict(p: int, k: int) -> Tensor:
        """The feature of p + 1 from step k at position p."""
        inputs = [
            weights["fc.weight"] @ torch.cat([scale * table[token_ids[j + 1]], feature(j, max(0, k - (p - j)))]) + bias
            for j in range(p + 1)
        ]
        attended = slow_layer.attend(layer, config, inputs, list(range(p + 1)))
        return slow_layer.finish(layer, config, inputs[-1] + attended)

    length = len(token_ids)
    return [[predict(t + k, k) for t in range(length - k - 1)] for k in range(config.ttt_steps)]


@torch.no_grad()
@pytest.mark.parametrize(
    "overrides",
    [{}, {"fc_bias": True, "num_key_value_heads": 4}, {"qkv_bias": True, "own_embedding": True}],
    ids=["plain", "bias", "published"],
)
def test_unroll_equals_the_slow_reference(target: Target, overrides: dict[str, Any]) -> None:
    for _, found, expected in slow_layer.unroll_both(eagle(target, ttt_steps=4, **overrides), unroll_slowly):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class TestWhatIsBorrowed:
    def test_the_targets_head_reads_the_output_without_a_norm(self) -> None:
        model: Any = tiny_target("gemma3", final_logit_softcapping=2.0)
        target = Target(model)
        heads = create_heads("eagle", target)
        hidden = torch.randn(2, 3, 32)
        torch.testing.assert_close(heads.score(hidden), 2 * torch.tanh(model.lm_head(hidden) / 2))
        assert heads.draft_token_ids is None


class TestGradients:
    def test_stop_between_steps(self, target: Target) -> None:
        """Without attention, step 1 knows the features through step 0's outputs only."""
        heads = eagle(target, ttt_steps=2)
        with torch.no_grad():
            heads.layers[0].self_attn.o_proj.weight.zero_()
        features = torch.randn(1, 6, 32, requires_grad=True)
        first, second = heads.unroll(features, random_prompt(6))
        second.hidden.sum().backward(retain_graph=True)
        assert heads.fc.weight.grad is not None
        assert features.grad is None or features.grad.abs().max() == 0
        first.hidden.sum().backward()
        assert features.grad.abs().max() > 0


class TestNoise:
    @pytest.mark.parametrize(("length", "width"), [(1024, 0.1), (64, 0.2)])
    def test_is_uniform_and_narrower_on_long_sequences(
        self, target: Target, length: int, width: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heads = eagle(target, ttt_steps=2)
        read: list[Tensor] = []
        prepare = heads.prepare
        monkeypatch.setattr(heads, "prepare", lambda embedded, state: read.append(state) or prepare(embedded, state))
        features = torch.randn(2, length, 32)
        loss_mask = torch.ones(2, length, dtype=torch.long)
        seeds = torch.randint(2**60, loss_mask.shape)
        first = heads.unroll_where(features, random_prompt(length, batch_size=2), loss_mask, seeds)[0]
        noise = read[0] - features
        assert 0.49 * width < noise.abs().max() <= 0.5001 * width
        assert noise.mean().abs() < 0.02 * width
        assert noise.std() == pytest.approx(width / 12**0.5, rel=0.02)
        assert torch.equal(read[1], first.hidden), "the draft's own features get none"

    def test_is_a_conversations_own(self, target: Target) -> None:
        """Whatever longer conversation is beside it, and whatever padding follows."""
        heads = eagle(target)
        input_ids, features = random_prompt(700, batch_size=2), torch.randn(2, 700, 32)
        loss_mask, seeds = torch.ones(2, 700, dtype=torch.long), torch.randint(2**60, (2, 700))
        loss_mask[1, 600:] = 0
        together = heads.unroll_where(features, input_ids, loss_mask, seeds)[0].hidden[1, :600]
        own = (x[1:, :600] for x in (features, input_ids, loss_mask, seeds))
        alone = heads.unroll_where(*own)[0].hidden[0]
        torch.testing.assert_close(alone[:599], together[:599])  # the last slot reads the token after it

    def test_is_for_training_alone(self, target: Target) -> None:
        input_ids, features = random_prompt(6), torch.randn(1, 6, 32)

        def is_same_again(heads: DraftHeads) -> bool:
            one, other = (heads(features, input_ids, loss_mask=torch.ones(1, 6))[0].hidden for _ in range(2))
            return torch.equal(one, other)

        heads = eagle(target)
        assert is_same_again(heads.eval())
        assert not is_same_again(heads.train())
        assert is_same_again(eagle(target, feature_noise=0.0).train())
