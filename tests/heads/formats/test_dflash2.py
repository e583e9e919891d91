"""DFlash 2 in its published layouts, against its forward pass written out."""

from typing import Any

import torch

from draftsmith.heads.formats.dflash2 import SELECTOR, DFlash2, DFlash2Speculators, VLLMDFlash2
from draftsmith.inference import Target
from tests.heads.formats.round_trip import change, export_heads, import_heads, publish
from tests.heads.formats.test_block import reference
from tests.heads.tiny_heads import encode_for, tiny_heads
from tests.tiny_targets import random_prompt

SETTINGS: dict[str, Any] = {"block_size": 4, "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6}
SIZES = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 16}


@torch.no_grad()
def test_drafts_are_those_of_the_authors(target: Target) -> None:
    """Rows after the anchor score the 16 best tokens; the token before adds its part by the row's state."""
    heads = tiny_heads("dflash2", target, **SETTINGS, feature_layers=[2, 4])
    published = publish(DFlash2(), heads)
    assert published.config["architectures"] == ["DFlash2DraftModel"]
    for place in (published.config["dflash_config"], publish(DFlash2Speculators(), heads).config):
        assert {name: place[name] for name in SIZES} == SIZES
    before, after, gate = (published[name] for name in SELECTOR.values())
    input_ids = random_prompt(12)
    read: Any = import_heads(DFlash2(), published, target)
    features = encode_for(read, input_ids).features
    steps = read.unroll(features, input_ids)
    assert len(steps) == 3
    for slot in (0, 4, 7):
        rows = reference(published, read, features[0, : slot + 1], int(input_ids[0, slot + 1]))
        for depth, step in enumerate(steps):
            row = rows[depth + 1]
            unary = row @ target.lm_head_weight().T
            scores = unary + after @ (before[input_ids[0, slot + 1 + depth]] * (gate @ row))
            is_candidate = torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, unary.topk(16).indices, True)
            expected = scores.masked_fill(~is_candidate, float("-inf"))
            torch.testing.assert_close(step.score(step.hidden[0, slot]), expected, rtol=1e-4, atol=1e-4)


def test_engines_see_all_of_a_block_in_layers_with_a_window(target: Target) -> None:
    """They would make such layers causal where nothing is said; speculators' default for DFlash 2 is the other."""
    heads = tiny_heads("dflash2", target, **SETTINGS, sliding_window=5)
    assert export_heads(VLLMDFlash2(), heads).config["dflash_config"]["causal"] is False
    published = publish(DFlash2Speculators(), heads)
    assert published.config["sliding_window_non_causal"] is True
    read = import_heads(DFlash2Speculators(), change(published, config={"sliding_window_non_causal": None}), target)
    assert not read.config.sliding_is_causal
