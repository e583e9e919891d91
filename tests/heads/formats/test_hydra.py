"""Hydra in the authors' format, against modules built as theirs are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaModel

from draftsmith.heads.formats.hydra import Hydra
from draftsmith.heads.formats.published import Published
from draftsmith.inference import Target
from tests.heads.formats.round_trip import export_heads, import_heads
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt, tiny_target

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PLAIN = {"num_heads": 3, "use_embedding_norm": False}
PLUS = {**PLAIN, "num_layers": 2, "use_prefix_attention": True, "use_prefix_norm": True, "rope_parameters": ROPE}


class Reference:
    """The authors' forward pass, over tensors with their names."""

    def __init__(self, target: Target, *, num_heads: int, num_layers: int, has_prefix: bool) -> None:
        self.target, self.num_heads, self.num_layers, self.has_prefix = target, num_heads, num_layers, has_prefix
        self.tensors: dict[str, Tensor] = {}
        for i in range(num_heads):
            shared = {"weight": torch.randn(32, 32) / 6, "bias": torch.randn(32)}
            for block in range(num_layers):
                place = f"hydra_mlp.{i}.{2 * block + 1 if has_prefix else block}"
                if block == 0:
                    for part in ("linear", "res_connection"):
                        self.tensors[f"{place}.{part}.weight"] = torch.randn(32, 32 * (i + 2)) / 8
                        self.tensors[f"{place}.{part}.bias"] = torch.randn(32)
                else:
                    self.tensors |= {f"{place}.linear.{part}": x for part, x in shared.items()}
            place = f"hydra_lm_head.{i}.1" if has_prefix else f"hydra_lm_head.{i}"
            self.tensors |= {f"{place}.weight": torch.randn(128, 32), f"{place}.bias": torch.randn(128)}
        if has_prefix:
            config = type(target.text_config)(**{**target.text_config.to_dict(), "num_hidden_layers": 1})
            config.rope_parameters = ROPE
            self.prefix: Any = LlamaModel(config).eval()
            nn.init.normal_(self.prefix.norm.weight)
            self.tensors |= {f"prefix_embeding_layer.{name}": x for name, x in self.prefix.state_dict().items()}
        self.config = {
            "hydra_num_heads": num_heads,
            "hydra_head_arch": "prefix-mlp" if has_prefix else "mlp",
            "grounded_heads": True,
        }

    @torch.no_grad()
    def scores(self, states: Tensor, input_ids: Tensor, i: int) -> Tensor:
        hidden = self.prefix(inputs_embeds=states)[0] if self.has_prefix else states
        embedded = self.target.embed_tokens(input_ids)
        inputs = [hidden, *(torch.roll(embedded, -shift, dims=1) for shift in range(1, i + 2))]
        x = torch.cat(inputs, dim=-1)
        for block in range(self.num_layers):
            place = f"hydra_mlp.{i}.{2 * block + 1 if self.has_prefix else block}"
            rest = self.apply(f"{place}.res_connection", x) if block == 0 else x
            x = rest + F.silu(self.apply(f"{place}.linear", x))
        return self.apply(f"hydra_lm_head.{i}.1" if self.has_prefix else f"hydra_lm_head.{i}", x)

    def apply(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]


@pytest.mark.parametrize("has_prefix", [False, True], ids=["mlp", "prefix-mlp"])
def test_heads_score_as_the_authors_do(has_prefix: bool, target: Target) -> None:
    reference = Reference(target, num_heads=3, num_layers=4, has_prefix=has_prefix)
    published = Published("x", reference.config, "hydra_lm_head.pt", reference.tensors)
    heads = import_heads(Hydra(), published, target)
    input_ids, states = random_prompt(9), torch.randn(1, 9, 32)
    for i, step in enumerate(heads.unroll(states, input_ids)):
        certain = 9 - 1 - i  # theirs reads tokens from the front where the text ends
        found = step.head(step.hidden)[:, :certain]
        torch.testing.assert_close(found, reference.scores(states, input_ids, i)[:, :certain], rtol=1e-4, atol=1e-4)
    assert not any("embed_tokens" in name for name in heads.state_dict())


def test_a_target_with_linear_scaling_hands_it_on() -> None:
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    target = Target(tiny_target("llama", rope_parameters=rope))
    heads = tiny_heads("hydra", target, **{**PLUS, "rope_parameters": {**rope, "rope_theta": 1e4}})
    exported = export_heads(Hydra(), heads)
    found = Hydra().read(Published("x", exported.config, "", exported.tensors), target)
    assert found.settings["rope_parameters"] == {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
