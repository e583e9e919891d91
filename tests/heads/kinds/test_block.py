"""Block drafters against a reference that loops over rows, their switches, and what they see.

Legend: B batch, T sequence length, N block size, K depths, D hidden size.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.heads.kinds.block import BlockHeads
from draftsmith.heads.modules import block_view as view_module
from draftsmith.inference import Target, generate
from tests.heads.kinds.slow_layer import run_block
from tests.heads.tiny_heads import compute_loss, encode_for, tiny_heads
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


def draft_slowly(heads: BlockHeads, features: Tensor, token_ids: list[int], slot: int) -> tuple[list[Tensor], Tensor]:
    """[K][V] logits and [K] confidences after one slot, as in the papers' equations. The Markov bias reads the
    tokens of `token_ids`."""
    config, weights = heads.config, heads.state_dict()
    table = heads.target.embed_tokens.weight
    block = torch.stack([table[token_ids[slot + 1]]] + [weights["mask_embedding"]] * (config.block_size - 1))
    hidden = run_block(weights, config, features[: slot + 1], block, is_causal=config.is_causal)
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


class TestTheConfidenceHead:
    """What decoding does with it."""

    @torch.no_grad()
    @pytest.mark.parametrize("overrides", [{"markov_rank": 5}, {}, {"predicts_at_anchor": True}], ids=str)
    def test_leaves_out_paths_that_are_hardly_reached(self, target: Target, overrides: dict[str, Any]) -> None:
        """Each path of a tree has its own chance."""
        heads = block(target, block_size=5, has_confidence=True, **overrides)
        prompt, features = [11, 12, 13, 14], torch.randn(1, 3, 96)
        levels = ([[7], [9], [7]], [0, 0, 0]), ([[9, 4], [7, 5], [7, 6]], [1, 0, 2])
        counts = []  # of the nodes that are left, for each threshold
        for threshold in (None, 0.0, *torch.linspace(0.05, 0.5, 10).tolist(), 1.0):
            heads.config.confidence_threshold = threshold
            state = heads.start(1, 16, 8)
            heads.extend(state, features, torch.tensor([prompt[1:]]), torch.tensor([3]), max_slots=3)
            counts.append(0)
            for depth, (paths, parents) in enumerate(levels, start=1):
                tokens = torch.tensor([[path[-1] for path in paths]])
                draft = heads.expand(state, tokens, torch.tensor([parents]), depth)
                found = draft.logits.expand(-1, len(paths), -1)[0]
                for node, path in enumerate(paths):
                    read = [*prompt, *path, 0, 0, 0]  # padded: deeper steps than this one are not looked at
                    logits, scores = draft_slowly(heads, features[0], read, 2)
                    confidences = scores.sigmoid()
                    if threshold is not None and confidences[: depth + 1].prod() < threshold:
                        assert found[node].isneginf().all()
                    else:
                        counts[-1] += 1
                        torch.testing.assert_close(found[node], logits[depth], rtol=1e-4, atol=1e-4)
        assert counts[0] == counts[1] == 6
        assert counts[-1] == 0
        assert len(set(counts)) > 2

    @pytest.mark.parametrize(
        ("threshold", "options"), [(1.0, {"do_sample": False}), (0.3, {"do_sample": True, "top_p": 0.9, "seed": 1})]
    )
    def test_changes_no_text(self, target: Target, threshold: float, options: dict[str, Any]) -> None:
        heads = block(target, block_size=4, markov_rank=5, has_confidence=True, confidence_threshold=threshold)
        expected = generate(target, None, random_prompt(9), max_new_tokens=24, **options).sequences
        for tree in ("dynamic", "chain", [[0], [1], [0, 0], [1, 0], [0, 0, 0]]):
            output = generate(target, heads, random_prompt(9), tree=tree, max_new_tokens=24, **options)
            assert torch.equal(output.sequences, expected)
            if threshold == 1.0:
                assert not any(output.stats.accepted_histogram[2:]), "only the root's children are left"

    def test_is_set_when_heads_are_loaded(self, target: Target, tmp_path: Path) -> None:
        block(target, block_size=4, has_confidence=True).save_pretrained(tmp_path)
        assert DraftHeads.from_pretrained(tmp_path).config.confidence_threshold is None
        heads = DraftHeads.from_pretrained(tmp_path, confidence_threshold=0.3)
        assert heads.config.confidence_threshold == 0.3
        heads.bind(target).config.confidence_threshold = 3
        with pytest.raises(ValueError, match="confidence_threshold is 3;"):
            generate(target, heads, random_prompt(4), max_new_tokens=2)


def test_loss_weights_fall_with_the_distance(target: Target) -> None:
    decay = create_heads("block", target, block_size=10).default_step_decay
    assert decay**3 == pytest.approx(math.exp(-3 / 5))


class TestTrainingSlots:
    def test_are_those_with_a_loss(self, target: Target) -> None:
        heads = block(target, block_size=3)
        input_ids, features = random_prompt(9), torch.randn(1, 9, 96)
        loss_mask = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 1, 0]])
        steps, every = heads.unroll_where(features, input_ids, loss_mask), heads.unroll(features, input_ids)
        for step, full in zip(steps, every, strict=True):
            assert sorted(step.slots[0].tolist()) == [1, 2, 5]
            assert full.slots[0].tolist() == [*range(7)]
            torch.testing.assert_close(step.hidden, full.hidden[:, step.slots[0]])

    def test_without_any_every_parameter_still_has_a_gradient(self, target: Target) -> None:
        heads = block(target, **SWITCHES["dspark"]).train()
        input_ids = random_prompt(9)
        mask = torch.zeros_like(input_ids)
        loss_type = "1.8*total_variation+0.1*cross_entropy"
        loss = compute_loss(heads, encode_for(heads, input_ids), input_ids, mask, loss_type=loss_type).loss
        assert loss.item() == 0
        loss.backward()
        trained = {name: weight for name, weight in heads.named_parameters() if weight.requires_grad}
        for name, parameter in trained.items():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() == 0, name
