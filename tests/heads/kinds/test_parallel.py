"""P-EAGLE against a reference that loops over slots and rows, what its rows see, and which are dropped.

Legend: B batch, T sequence length, K depths, D hidden size.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads.kinds.parallel import ParallelHeads
from draftsmith.inference import Target
from tests.heads.kinds import slow_layer
from tests.heads.kinds.slow_layer import norm
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt

parallel = partial(tiny_heads, "parallel")


def draft_slowly(heads: ParallelHeads, features: Tensor, token_ids: list[int], slot: int) -> list[Tensor]:
    """[K] outputs after one slot: over the slots 0 to `slot` and K - 1 masks after them, the layers are an ordinary
    causal decoder."""
    config, weights = heads.config, heads.state_dict()
    table = weights.get("embed_tokens.weight", heads.target.embed_tokens.weight)
    eps, num_masks = config.rms_norm_eps, config.num_depths - 1
    mask = weights["mask_embedding"] if config.mask_token_id is None else table[config.mask_token_id]

    def fuse(feature: Tensor) -> Tensor:
        parts = feature.chunk(3)
        if config.fc_norm:
            parts = [norm(part, weights[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)]
        return weights["fc.weight"] @ torch.cat([*parts])

    g_of_mask = fuse(weights["mask_hidden"])
    embedded = [table[token_ids[t + 1]] for t in range(slot + 1)] + [mask] * num_masks
    hidden = [fuse(features[t]) for t in range(slot + 1)] + [g_of_mask] * num_masks
    for layer in range(config.num_layers):
        weight = slow_layer.layer_weights(weights, "midlayer." if layer == 0 else f"layers.{layer - 1}.")
        if layer == 0:
            inputs = [
                torch.cat([norm(e, weight["input_layernorm.weight"], eps), norm(g, weight["hidden_norm.weight"], eps)])
                for e, g in zip(embedded, hidden, strict=True)
            ]
        else:
            inputs = [norm(x, weight["input_layernorm.weight"], eps) for x in hidden]
        hidden = [
            slow_layer.finish(
                weight, config, x + slow_layer.attend(weight, config, inputs[: i + 1], list(range(i + 1)))
            )
            for i, x in enumerate(hidden)
        ]
    return hidden[slot:]


@torch.no_grad()
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    "overrides",
    [
        {"num_depths": 4, "num_layers": 3, "fc_norm": False},
        {"num_depths": 2, "num_layers": 1},
        {"num_depths": 3, "qkv_bias": True, "o_bias": True},
        {"num_depths": 3, "own_embedding": True, "mask_token_id": 7},
    ],
)
def test_unroll_equals_the_slow_reference(target: Target, overrides: dict[str, Any], is_training: bool) -> None:
    heads = parallel(target, **overrides)
    input_ids, features = random_prompt(9, batch_size=2), torch.randn(2, 9, 96)
    seeds = torch.arange(18).view(2, 9) * 7 % 5 if is_training else None
    steps = heads.unroll_where(features, input_ids, torch.ones_like(input_ids), seeds)
    assert [step.shift for step in steps] == list(range(2, 2 + heads.max_depth))
    for row in range(2):
        expected = {slot: draft_slowly(heads, features[row], input_ids[row].tolist(), slot) for slot in range(8)}
        for depth, step in enumerate(steps):
            slots = range(9) if step.slots is None else step.slots[row].tolist()
            for column, slot in enumerate(slots):
                if 0 <= slot < 8:
                    found = step.hidden[row, column]
                    torch.testing.assert_close(found, expected[slot][depth], rtol=1e-4, atol=1e-4)


class TestDropping:
    def test_every_depth_keeps_a_least_share(self, target: Target) -> None:
        heads = parallel(target, num_depths=6, keep_ratio=0.5, min_keep_ratio=0.2)
        bands = heads.choose_bands(torch.arange(40)[None])
        kept = [sum(band.slots.shape[1] for band in bands if band.num_rows >= depth) for depth in range(1, 6)]
        assert kept == [20, 10, 8, 8, 8]

    def test_each_sequence_keeps_its_own_share(self, target: Target) -> None:
        """Whatever longer sequence is beside it; of one slot all rows are kept, and of none nothing."""
        heads = parallel(target, num_depths=3)
        counts = torch.tensor([10, 3, 1, 0])[:, None]
        drawn = torch.arange(10).expand(4, -1).masked_fill(torch.arange(10) >= counts, -1)
        bands = heads.choose_bands(drawn)
        kept = [sum((band.slots >= 0).sum(1) for band in bands if band.num_rows >= depth) for depth in (1, 2)]
        assert [numbers.tolist() for numbers in kept] == [[7, 3, 1, 0], [5, 2, 1, 0]]

    def test_a_slot_that_keeps_a_row_keeps_those_before_it(self, target: Target) -> None:
        heads = parallel(target, num_depths=5)
        loss_mask = torch.zeros(2, 30, dtype=torch.long)
        loss_mask[0, 6:], loss_mask[1, 12:20] = 1, 1
        seeds = torch.randint(2**60, (2, 30))
        steps = heads.unroll_where(torch.randn(2, 30, 96), random_prompt(30, batch_size=2), loss_mask, seeds)
        assert steps[0].slots is None
        for row in range(2):
            before = set((loss_mask[row].nonzero().flatten() - 2).tolist())
            for step in steps[1:]:
                slots = [slot for slot in step.slots[row].tolist() if slot >= 0]
                assert len(set(slots)) == len(slots) > 0
                assert set(slots) <= before
                before = set(slots)
