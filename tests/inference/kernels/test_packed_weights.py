"""Packed weights: the same numbers up to rounding, and a model that stays as it was."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from draftsmith.heads import HEAD_TYPES, create_heads
from draftsmith.inference import Decoder, Target
from draftsmith.inference.kernels import packed_weights
from draftsmith.inference.kernels.packed_weights import PackedLinear, pack
from tests.params import slow_but
from tests.tiny_targets import CORE_FAMILIES, FAMILIES, random_prompt, tiny_target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4), (2, 16), (1, 70)])
def test_products_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40).to(dtype).requires_grad_(False)
    states = torch.randn(*shape, 96, dtype=dtype)
    packed = pack(linear)(states)
    assert (packed.shape, packed.dtype) == ((*shape, 40), dtype)
    torch.testing.assert_close(packed, linear(states))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of the layers of every product that packed weights compute."""
    sizes: list[list[int]] = []
    multiply = packed_weights._multiply

    def noted(rows: Tensor, matrix: packed_weights.PackedMatrix) -> Tensor:
        sizes.append(matrix.sizes)
        return multiply(rows, matrix)

    monkeypatch.setattr(packed_weights, "_multiply", noted)
    return sizes


class Attention(nn.Module):
    """Three layers that may read different states. Their input is `states[readers]`."""

    def __init__(self, *, has_bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, size, bias=has_bias) for size in (16, 8, 8))

    def forward(self, states: Sequence[Tensor], readers: Sequence[int] = (0, 0, 0)) -> list[Tensor]:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        return [layer(states[reader]) for layer, reader in zip(layers, readers, strict=True)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("readers", [(0, 0, 0), (0, 1, 0), (0, 1, 1)])
def test_layers_with_one_input_are_one_product(
    has_bias: bool, readers: tuple[int, ...], products: list[list[int]]
) -> None:
    torch.manual_seed(0)
    module, states = Attention(has_bias=has_bias).requires_grad_(False), [torch.randn(2, 5, 32) for _ in range(2)]
    packed = pack(module)
    torch.testing.assert_close(packed(states, readers), module(states, readers))
    assert products == [[16, 8, 8]]
    packed.q_proj(states[0])
    kept = weakref.ref(states.pop(0))
    assert kept() is None, "states must not outlive the pass"


def test_cross_attention_computes_what_it_is_asked_for(products: list[list[int]]) -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({name: Attention(has_bias=False) for name in ("self_attn", "encoder_attn", "cross_attn")})
    packed = pack(module.requires_grad_(False))
    states = [torch.randn(1, 5, 32) for _ in range(2)]
    for name in ("encoder_attn", "cross_attn"):
        torch.testing.assert_close(packed[name](states, (0, 1, 1)), module[name](states, (0, 1, 1)))
    assert products == [[16], [8], [8]] * 2
    packed["self_attn"](states)
    assert products[6:] == [[16, 8, 8]]


def test_blocks_project_their_context_without_queries(products: list[list[int]]) -> None:
    torch.manual_seed(0)
    attention = create_heads("block", Target.of(tiny_target("llama"))).layers[0].self_attn.requires_grad_(False)
    packed = pack(attention)
    context, positions = torch.randn(1, 5, attention.k_proj.in_features), torch.arange(5)[None]
    found = packed.project_context(context, positions)
    torch.testing.assert_close(found, attention.project_context(context, positions))
    packed.project(context, positions)
    both = [attention.k_proj.out_features, attention.v_proj.out_features]
    assert products == [both, [attention.q_proj.out_features], both]


def test_compiled_layers_with_one_input_are_one_product() -> None:
    torch.manual_seed(0)
    module, states = Attention(has_bias=False).requires_grad_(False), [torch.randn(2, 5, 32)]
    graphs: list[torch.fx.GraphModule] = []

    def keep_graph(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep_graph, inference_compiler=keep_graph)
    with torch.no_grad():
        found = torch.compile(pack(module), fullgraph=True, backend=backend)(states)
    torch.testing.assert_close(found, module(states))
    assert sum("packed_linear" in str(node.target) for node in graphs[0].graph.nodes) == 1


@pytest.mark.parametrize("family", slow_but({*CORE_FAMILIES, "gpt2", "deepseek_v3", "gpt_oss"}, FAMILIES))
def test_a_model_and_its_twin_say_the_same(family: str) -> None:
    model = tiny_target(family)
    prompt, twin = random_prompt(20), pack(model)
    kinds = [type(module) for module in model.modules()]
    with torch.no_grad():
        ours, theirs = (one(prompt, output_hidden_states=True) for one in (twin, model))
    assert any(type(module) is PackedLinear for module in twin.modules())
    assert kinds == [type(module) for module in model.modules()]
    assert len(ours.hidden_states) == len(theirs.hidden_states) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(ours.logits, theirs.logits, atol=2e-4, rtol=2e-4)
    assert {id(weight) for weight in twin.parameters()} == {id(weight) for weight in model.parameters()}


@pytest.mark.parametrize("kind", slow_but({"kangaroo", "block"}, list(HEAD_TYPES)))
def test_texts_are_those_of_transformers(kind: str) -> None:
    model = tiny_target("llama")
    heads, prompt = create_heads(kind, Target.of(model)), random_prompt(9)
    text = Decoder(model, heads, pack_weights=True).generate(prompt, max_new_tokens=24, do_sample=False).sequences
    assert torch.equal(text, model.generate(prompt, max_new_tokens=24, do_sample=False))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_work_on_packed_weights() -> None:
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    model = peft.get_peft_model(tiny_target("llama"), peft.LoraConfig(init_lora_weights=False)).eval()
    prompt = random_prompt(9)
    text = Decoder(model, pack_weights=True).generate(prompt, max_new_tokens=12, do_sample=False).sequences
    assert torch.equal(text, model.generate(input_ids=prompt, max_new_tokens=12, do_sample=False))


def test_packed_weights_are_not_packed_again() -> None:
    packed = Target.of(tiny_target("llama")).with_packed_weights()
    assert packed.with_packed_weights() is packed


def test_weights_that_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="in float32, and in bfloat16 with AVX-512"):
        Decoder(tiny_target("llama", dtype=torch.float16), pack_weights=True)
