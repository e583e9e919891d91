"""Hydra in the authors' format, against their forward pass written out here."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaModel

from draftsmith.heads.formats.hydra import Hydra
from draftsmith.heads.formats.published import Published
from draftsmith.inference import Target
from tests.heads.formats.round_trip import change, import_heads, publish
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt, tiny_target

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PLAIN = {"num_heads": 3, "use_embedding_norm": False}
PLUS = {**PLAIN, "use_prefix_attention": True, "use_prefix_norm": True, "rope_parameters": ROPE}
NUM_LAYERS = 4


def reference(published: Published, target: Target, states: Tensor, input_ids: Tensor, i: int) -> Tensor:
    """The scores of head i, by their names."""
    has_prefix = published.config["hydra_head_arch"] == "prefix-mlp"
    if has_prefix:
        shape = {**target.text_config.to_dict(), "num_hidden_layers": 1, "rope_parameters": ROPE}
        prefix: Any = LlamaModel(type(target.text_config)(**shape)).eval()
        name = "prefix_embeding_layer."
        prefix.load_state_dict({key.removeprefix(name): x for key, x in published.items() if key.startswith(name)})
        states = prefix(inputs_embeds=states)[0]

    def apply(name: str, x: Tensor) -> Tensor:
        return x @ published[f"{name}.weight"].T + published[f"{name}.bias"]

    embedded = target.embed_tokens(input_ids)
    x = torch.cat([states, *(torch.roll(embedded, -shift, dims=1) for shift in range(1, i + 2))], dim=-1)
    for block in range(NUM_LAYERS):
        place = f"hydra_mlp.{i}.{2 * block + 1 if has_prefix else block}"
        rest = apply(f"{place}.res_connection", x) if block == 0 else x
        x = rest + F.silu(apply(f"{place}.linear", x))
    return apply(f"hydra_lm_head.{i}.1" if has_prefix else f"hydra_lm_head.{i}", x)


@torch.no_grad()
@pytest.mark.parametrize("settings", [PLAIN, PLUS], ids=["mlp", "prefix-mlp"])
def test_heads_score_as_the_authors_do(settings: dict[str, Any], target: Target) -> None:
    """Blocks after the first share their weights there, and the prefix layer's model has embeddings that it never
    reads."""
    written: Any = tiny_heads("hydra", target, num_layers=NUM_LAYERS, use_biases=True, **settings)
    for mlp in written.mlps:
        for place in (5, 7):
            mlp[place].load_state_dict(mlp[3].state_dict())
    published = publish(Hydra(), written)
    if settings is PLUS:
        published = change(published, {"prefix_embeding_layer.embed_tokens.weight": target.embed_tokens.weight})
    heads = import_heads(Hydra(), published, target)
    input_ids, states = random_prompt(9), torch.randn(1, 9, 32)
    for i, step in enumerate(heads.unroll(states, input_ids)):
        certain = 9 - 1 - i  # theirs reads tokens from the front where the text ends
        found, expected = step.head(step.hidden), reference(published, target, states, input_ids, i)
        torch.testing.assert_close(found[:, :certain], expected[:, :certain], rtol=1e-4, atol=1e-4)
    assert not any("embed_tokens" in name for name in heads.state_dict())


def test_a_target_with_linear_scaling_hands_it_on() -> None:
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    target = Target(tiny_target("llama", rope_parameters=rope))
    heads = tiny_heads("hydra", target, **{**PLUS, "rope_parameters": {**rope, "rope_theta": 1e4}})
    found = Hydra().read(publish(Hydra(), heads), target)
    assert found.settings["rope_parameters"] == {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
