"""DFlash 2: its convolutions, its start from DFlash, and the trees of its candidates."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads.kinds.dflash2 import DFlash2Heads
from draftsmith.inference import DraftSampling, DynamicTree, Target, generate
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt

dflash2 = partial(tiny_heads, "dflash2", block_size=5, selector_rank=8)


class TestGrowing:
    def test_drafts_bit_for_bit_what_dflash_drafts(self, target: Target) -> None:
        block = tiny_heads("block", target, block_size=5, sliding_window=6, num_anchors=7)
        grown = DFlash2Heads.grow_from(block, selector_rank=8, conv_kernel_size=3).eval()
        assert (grown.config.num_anchors, grown.config.sliding_window, grown.config.selector_rank) == (7, 6, 8)
        prompt, features = random_prompt(12, batch_size=2), torch.randn(2, 11, 96)
        counts, nodes = torch.tensor([11, 6]), torch.tensor([[3, 9, 3], [7, 1, 2]])
        with torch.no_grad():
            states = [heads.start(2, 32, 8) for heads in (block, grown)]
            drafts = [
                [heads.extend(state, features, prompt[:, 1:], counts, max_slots=11)]
                + [heads.expand(state, nodes, torch.zeros_like(nodes), depth) for depth in (1, 2, 3)]
                for heads, state in zip((block, grown), states, strict=True)
            ]
            for whole, few in zip(*drafts, strict=True):
                best, ids = whole.logits.topk(16, dim=-1)
                assert torch.equal(few.logits, best.expand_as(few.logits))
                assert torch.equal(few.token_ids, ids.expand_as(few.token_ids))
            for one, other in zip(
                block.unroll(features, prompt[:, :11]), grown.unroll(features, prompt[:, :11]), strict=True
            ):
                assert torch.equal(one.head(one.hidden), other.head(other.hidden))

    def test_what_it_cannot_start_from(self, target: Target) -> None:
        for heads, message in (
            (tiny_heads("medusa", target), "these are medusa heads: start new"),
            (tiny_heads("block", target, markov_rank=4), "block heads with parts of DSpark"),
        ):
            with pytest.raises(ValueError, match=message):
                DFlash2Heads.grow_from(heads)
        with pytest.raises(ValueError, match=r"\{'intermediate_size': 8\} do not fit .*mlp.gate_proj"):
            DFlash2Heads.grow_from(tiny_heads("block", target), intermediate_size=8)


class TestTrees:
    @pytest.fixture
    def heads(self, target: Target) -> Any:
        return dflash2(target)

    @torch.no_grad()
    def test_every_node_has_its_own_distribution(self, heads: Any) -> None:
        """The score of a node is the sum of the log-softmaxes over the 16 candidates of each row on its path."""
        prompt, features = random_prompt(9), torch.randn(1, 8, 96)
        state = heads.start(1, 32, 64)
        draft = heads.extend(state, features, prompt[:, 1:], torch.tensor([8]), max_slots=8)
        tree = DynamicTree(depth=4, top_k=4, num_nodes=40).grow(
            heads, state, prompt[:, -1], draft, DraftSampling(greedy_temperature=1.0)
        )
        weights = heads.state_dict()
        before, after, gate = (
            weights[f"selector.{name}.weight"]
            for name in ("predecessor_embedding", "successor_embedding", "hidden_projection")
        )
        assert tree.num_nodes == 40
        for node in range(1, 40):
            parent, depth = int(tree.parents[0, node]), int(tree.depths[0, node])
            unary, row = state.logits[0, depth - 1], state.hidden[0, depth - 1]
            ids = unary.topk(16).indices
            scores = unary[ids] + after[ids] @ (before[tree.token_ids[0, parent]] * (gate @ row))
            own = scores.log_softmax(0)[ids.tolist().index(int(tree.token_ids[0, node]))]
            torch.testing.assert_close(tree.log_probs[0, node] - tree.log_probs[0, parent], own, rtol=1e-4, atol=1e-4)

    def test_rejection_draws_from_the_candidates(self, target: Target, heads: Any) -> None:
        """T = 1 in batches: texts differ, and only tokens that the target allows are in them."""
        options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "top_k": 5, "acceptance": "rejection"}
        output = generate(
            target, heads, random_prompt(9, batch_size=3), tree=[[0], [1], [0, 0], [1, 0]], seed=2, **options
        )
        logits: Tensor = target.model(output.sequences).logits[:, 8:-1]
        drawn = logits.gather(2, output.sequences[:, 9:, None])
        assert (logits > drawn).sum(-1).max() < 5
        assert sum(output.stats.accepted_histogram[1:]) > 0


@torch.no_grad()
def test_fewer_tokens_have_the_scores_that_they_had(target: Target) -> None:
    """All tokens are candidates, of the whole heads and of a view that scores 24 tokens."""
    heads = dflash2(target, selector_top_k=128)
    torch.nn.init.normal_(heads.selector.successor_embedding.weight)
    heads.limit_vocabulary(24, torch.arange(128) % 7)
    view, features = heads.for_target(target), torch.randn(1, 9, 96)
    few, whole = (one.unroll(features, random_prompt(9))[1] for one in (view, heads))
    expected = whole.score(whole.hidden)[..., view.draft_token_ids]
    assert torch.allclose(few.score(few.hidden), expected, rtol=1e-4, atol=1e-4)
