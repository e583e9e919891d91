"""Medusa under the authors' and vLLM's names, against the forward pass of each project written out here."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.heads.formats.medusa import Medusa, VLLMMedusa
from draftsmith.heads.formats.published import Published
from draftsmith.inference import Target
from tests.heads.formats.round_trip import (
    assert_same_heads,
    change,
    import_heads,
    publish,
    refusal_of,
)
from tests.heads.tiny_heads import tiny_heads


def authors_tensors(num_heads: int, num_layers: int) -> dict[str, Tensor]:
    tensors = {}
    for i in range(num_heads):
        for j in range(num_layers):
            tensors |= {f"{i}.{j}.linear.weight": torch.randn(32, 32), f"{i}.{j}.linear.bias": torch.randn(32)}
        tensors[f"{i}.{num_layers}.weight"] = torch.randn(128, 32)
    return tensors


def test_heads_are_counted_and_score_as_the_authors_do(target: Target) -> None:
    """Published configs say 2 heads of a file with 5."""
    tensors = authors_tensors(5, 2)
    published = Published("x", {"medusa_num_heads": 2, "medusa_num_layers": 2}, "medusa_lm_head.pt", tensors)
    heads: Any = import_heads(Medusa(), published, target)
    assert heads.max_depth == 5
    x = torch.randn(1, 4, 32)
    for i, step in enumerate(heads.unroll(x, torch.zeros(1, 4, dtype=torch.long))):
        y = x
        for j in range(2):
            y = y + F.silu(y @ tensors[f"{i}.{j}.linear.weight"].T + tensors[f"{i}.{j}.linear.bias"])
        torch.testing.assert_close(step.head(step.hidden), y @ tensors[f"{i}.2.weight"].T)


def test_the_checkpoint_of_a_whole_model(target: Target) -> None:
    heads = tiny_heads("medusa", target, num_heads=2)
    own: dict[str, Tensor] = target.model.state_dict()
    whole = own | {f"medusa_head.{name}": x for name, x in publish(Medusa(), heads).items()}
    published = Published("x", {}, "model.safetensors", whole)
    assert Medusa().matches(published)
    assert_same_heads(import_heads(Medusa(), published, target), heads)
    name = "model.layers.0.mlp.up_proj.weight"
    assert f"{name} differs from the target's own" in refusal_of(
        Medusa(), change(published, {name: own[name] + 1}), target
    )
    assert "model.extra has no place" in refusal_of(
        Medusa(), change(published, {"model.extra": torch.zeros(1)}), target
    )


@pytest.mark.parametrize("version", [None, 2])
def test_the_version_is_seen_from_the_tensors(version: Any, target: Target) -> None:
    heads: Any = tiny_heads("medusa", target, num_heads=2, shares_lm_head=True)
    x = torch.randn(1, 4, 32)
    for head, step in zip(heads.heads, heads.unroll(x, torch.zeros(1, 4, dtype=torch.long)), strict=True):
        torch.testing.assert_close(step.head(step.hidden), head.blocks(x) @ target.lm_head_weight().T)
    published = change(publish(Medusa(), heads), config={"version": version})
    notes = Medusa().read(published, target).notes
    assert len(notes) == (version != 2)
    assert all("no head has a projection of its own" in note for note in notes)
    assert_same_heads(import_heads(Medusa(), published, target), heads)
    own = tiny_heads("medusa", target, num_heads=2)
    published = change(publish(Medusa(), own), config={"version": version})
    assert_same_heads(import_heads(Medusa(), published, target), own)
    assert "tensor 0.1.weight is missing" in refusal_of(Medusa(), change(published, {"0.1.weight": None}), target)


class TestVllm:
    """What its loader does without a word, and what is refused here."""

    def test_without_biases(self, target: Target) -> None:
        heads = tiny_heads("medusa", target, num_heads=2)
        with torch.no_grad():
            for name, parameter in heads.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
        published = publish(VLLMMedusa(), heads)
        dropped = change(published, config={"medusa_fc_bias": None})
        assert "no medusa_fc_bias, but there are biases" in refusal_of(VLLMMedusa(), dropped, target)
        without = change(dropped, dict.fromkeys(name for name in published if name.endswith("bias")))
        assert_same_heads(import_heads(VLLMMedusa(), without, target), heads)

    def test_a_shared_lm_head_is_the_targets(self, target: Target) -> None:
        heads = tiny_heads("medusa", target, num_heads=2, shares_lm_head=True)
        published = publish(VLLMMedusa(), heads)
        other = change(published, {"lm_head.weight": torch.randn(128, 32)})
        assert "lm_head.weight differs from the target's own" in refusal_of(VLLMMedusa(), other, target)
