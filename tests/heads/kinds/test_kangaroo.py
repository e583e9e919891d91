"""Kangaroo against a reference that runs the target plainly over each path, its second exit, and its rows in the cache.

Legend: B batch, T sequence length, D hidden size, V vocabulary.
"""

import dataclasses
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaModel

from draftsmith.heads import create_heads
from draftsmith.heads.kinds.kangaroo import KangarooHeads
from draftsmith.inference import DynamicTree, Target
from draftsmith.inference.step import Step
from tests.heads.kinds import slow_layer
from tests.heads.kinds.slow_layer import norm
from tests.heads.test_contract import Prefix, assert_scores, assert_tree_matches
from tests.heads.tiny_heads import encode_for, tiny_heads
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


class TestRefusedTargets:
    """Found when heads are bound, not when they have been trained."""

    def test_layers_that_do_not_run_by_themselves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model: Any = tiny_target("llama")
        run = LlamaModel.forward
        # A forward that knows the model it was made for: a copy still runs the whole of it.
        monkeypatch.setattr(LlamaModel, "forward", lambda _, **inputs: run(model.model, **inputs))
        with pytest.raises(ValueError, match=r"first 2 layers of LlamaForCausalLM .* differ by"):
            create_heads("kangaroo", Target(model), exit_layer=2)

    def test_logits_that_are_more_than_an_lm_head(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target = Target(tiny_target("llama"))
        monkeypatch.setattr(target, "capabilities", dataclasses.replace(target.capabilities, scale_logits=None))
        with pytest.raises(ValueError, match="logits cannot be computed"):
            create_heads("kangaroo", target)


def test_the_first_layers_are_prepared_once_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets of one model share them, and they do not keep the model alive."""
    model = tiny_target("llama")
    heads = kangaroo(Target.of(model))
    monkeypatch.setattr(
        "draftsmith.inference.targets.target.take_first_layers", lambda *_: pytest.fail("prepared again")
    )
    heads.for_target(Target.of(model))
    freed = weakref.ref(model)
    del model, heads
    gc.collect()
    assert freed() is None


@torch.no_grad()
@pytest.mark.parametrize("overrides", [{}, {"exit_layer": 4, "num_key_value_heads": 4}], ids=str)
def test_unroll_equals_the_slow_reference(target: Target, overrides: dict[str, Any]) -> None:
    heads = kangaroo(target, **overrides)
    input_ids = random_prompt(9, batch_size=2)
    (step,) = heads.unroll(encode_for(heads, input_ids).features, input_ids)
    assert step.shift == 2
    for row in range(2):
        expected = score_slowly(heads, input_ids[row].tolist())
        torch.testing.assert_close(step.head(step.hidden[row, :-1]), expected[1:], rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_drafts_equal_plain_passes_over_each_path(family: str, attn_implementation: str) -> None:
    """Rows of different lengths, longer than the window of 8; four layers hold every kind of attention."""
    heads = kangaroo(target_of(family, attn_implementation=attn_implementation), exit_layer=4)
    prefix = Prefix(heads, [15, 11])
    state = prefix.start(32, 32)
    found = prefix.extend(state, [0, 0], prefix.counts.tolist())
    for row in range(2):
        assert_scores(found[row], prefix.expected(row, []))
    assert_tree_matches(prefix, state)


class TestTheSharedCache:
    def test_has_room_for_the_largest_draft(self, target: Target) -> None:
        """Few nodes chosen from a wide beam: more rows are drafted than verified."""
        heads = kangaroo(target)
        tree = DynamicTree(depth=3, top_k=4, num_nodes=4)
        step = Step(target, heads, tree, is_coupled=True)
        assert (step.num_nodes, step.path_width, tree.num_scratch) == (4, 4, 8)
        assert step.num_slots_after == 4 + 1 + 8
        assert Step(target, None, None, is_coupled=True).num_slots_after == 1


@torch.no_grad()
def test_the_second_exit_drafts_nothing_after_a_doubtful_token(target: Target) -> None:
    """In a chain of the best tokens by the slow reference. A token was drawn from the distribution after the one above
    it."""
    heads = kangaroo(target)
    prefix, chances, found = Prefix(heads, [7]), [], set()
    path = prefix.token_ids[0].tolist()
    for _ in range(4):
        scores = score_slowly(heads, path)[-1].softmax(-1)
        chances.append(float(scores.max()))
        path.append(int(scores.argmax()))
    for threshold in (0.0, *(chance + 1e-4 for chance in chances), 1.0):
        heads.config.confidence_threshold = threshold
        state = prefix.start(32, 8)
        assert prefix.extend(state, [0], [6]).isfinite().all()
        for depth in range(1, 4):
            token = torch.tensor([[path[6 + depth]]])
            logits = heads.expand(state, token, torch.zeros_like(token), depth).logits
            assert (logits.isneginf() == (chances[depth - 1] < threshold)).all()
        found.add(sum(chance < threshold for chance in chances[:3]))
    assert len(found) > 2
