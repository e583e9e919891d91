"""Targets with quantised or offloaded weights, on several devices, or split over processes: what a CPU can show."""

import copy
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from draftsmith.inference import DynamicTree, NgramDrafter, Target, generate, stream
from draftsmith.inference.cache.kv_cache import KVCache, LayerSpec, Span
from draftsmith.inference.targets.probing.probe import Capabilities
from draftsmith.inference.trees.token_tree import TokenTree
from draftsmith.training.features.encoding import encode
from tests.conftest import REPOSITORY
from tests.inference.targets.test_target_refusals import ignore_argument
from tests.inference.tiny_encoder_decoders import tiny_encoder_decoder
from tests.processes import TORCHRUN, run_python
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

TREE = DynamicTree(depth=4, top_k=4, num_nodes=24)
HERE, THERE = torch.device("cpu"), torch.device("lazy:0")


def check_greedy_text(model: PreTrainedModel) -> Target:
    prompt = random_prompt(6)
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
    target = Target(model)
    drafter = ScriptedDrafter([expected[0]], VOCAB_SIZE)
    output = generate(target, drafter, prompt, max_new_tokens=30, do_sample=False, tree=TREE)
    assert torch.equal(output.sequences, expected)
    assert output.stats.acceptance_length > 1.5
    return target


@pytest.mark.filterwarnings("ignore")  # of accelerate, about the parameters it has put elsewhere
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_offloaded_weights(family: str, tmp_path: Path) -> None:
    """accelerate puts weights on disk, leaves them on "meta", and brings them for each pass."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is an optional extra")
    model = tiny_target(family, initializer_range=0.3)
    places: dict[str, str] = {f"model.layers.{layer}": "disk" if layer >= 3 else "cpu" for layer in range(6)}
    places |= {"model.embed_tokens": "disk", "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}
    model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    target = check_greedy_text(model)
    assert model.lm_head.weight.is_meta
    assert target.embed_tokens.weight.is_meta
    assert target.device == torch.device("cpu")
    assert target.final_norm_gain().device == target.device
    hidden = torch.randn(2, target.hidden_size, requires_grad=True)
    target.compute_logits(hidden).sum().backward()
    assert hidden.grad is not None
    target.prepare_first_layers(2)


def split_over_devices(
    model: Any, capabilities: Capabilities, there: Iterable[nn.Module], layers: Sequence[nn.Module]
) -> Target:
    """The target of a model with the shapes, devices and hooks that a device map would give it.

    Args:
        capabilities: of the model before.
        there: the modules on the second device; all others are here.
        layers: those that write into the cache.
    """
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is an optional extra")

    def place(module: nn.Module, device: torch.device) -> None:
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                empty = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                setattr(part, name, nn.Parameter(empty, requires_grad=False))
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device=device))

    def move(spec: LayerSpec, layer: nn.Module) -> LayerSpec:
        device = next(layer.parameters()).device
        return replace(spec, keys=replace(spec.keys, device=device), values=replace(spec.values, device=device))

    place(model, HERE)
    for module in there:
        place(module, THERE)
    if not hasattr(model.lm_head, "_hf_hook"):
        hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook(execution_device=HERE))
    specs = tuple(move(spec, layer) for spec, layer in zip(capabilities.layer_specs, layers, strict=True))
    return Target(model, capabilities=replace(capabilities, layer_specs=specs))


def decode_tree(target: Target, cache: KVCache, **features: Any) -> list[Tensor]:
    """A prompt, a tree, a commit, and a batch from which a row leaves; returns what comes out."""
    batch_size = cache.batch_size
    token_ids = torch.zeros(3, 9, dtype=torch.long)
    read = target.prefill(cache, token_ids, torch.full((batch_size,), 7), **features)
    parents, depths = torch.tensor([[-1, 0, 0, 1]]), torch.tensor([[0, 1, 1, 2]])
    nodes = (token_ids[:, :4], *(row.expand(batch_size, -1) for row in (parents, depths)))
    cache.open_slots(4, Span(7, 7))
    verified = target.verify(cache, TokenTree(*nodes, torch.zeros(batch_size, 4)), **features)
    cache.commit(torch.tensor([[0, 2]]).expand(batch_size, -1), torch.full((batch_size,), 2))
    cache.keep_rows([batch_size - 1])
    last = target.prefill(cache, token_ids[:1, :1], torch.ones(1, dtype=torch.long), span=Span(9, 9), **features)
    outputs = [part for output in (read, verified, last) for part in (output.logits, output.features)]
    return [part for part in outputs if part is not None]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_on_two_devices(family: str) -> None:
    """Tensors without values, whose devices torch checks: nothing of one device meets anything of another."""
    model = tiny_target(family)
    capabilities, layers = Target(model).capabilities, model.model.layers
    with FakeTensorMode():
        target = split_over_devices(model, capabilities, [*layers[3:], model.model.norm, model.lm_head], layers)
        with pytest.raises(RuntimeError, match="two devices"):
            torch.ones(1, device=HERE) + torch.ones(1, device=THERE)
        cache = target.new_cache(3, 64)
        assert {plane.device for plane in cache._keys} == {HERE, THERE}
        outputs = decode_tree(target, cache, feature_layers=(1, 5, 6))
        token_ids = torch.zeros(3, 9, dtype=torch.long)
        encoded = encode(target, token_ids, torch.ones_like(token_ids), feature_layers=(1, 6))
        outputs += [encoded.features, encoded.last_hidden, target.compute_logits(encoded.last_hidden), cache.lengths]
        assert len(outputs) == 10
        assert {output.device for output in outputs} == {HERE}


@pytest.mark.parametrize(("kind", "first_there"), [("t5", 0), ("bart", 1)])
def test_encoder_decoder_layers_on_two_devices(kind: str, first_there: int) -> None:
    """Encoder and decoder end on another device than they begin on."""
    model: Any = copy.deepcopy(tiny_encoder_decoder(kind))
    stacks = [model.get_encoder(), model.get_decoder()]
    layers = [list(stack.block if kind == "t5" else stack.layers) for stack in stacks]
    there = [*layers[0][1:], *layers[1][first_there:]]
    if kind == "t5":
        there += [stacks[0].final_layer_norm, stacks[1].final_layer_norm, model.lm_head]
    capabilities = Target(model).capabilities
    with FakeTensorMode():
        target = split_over_devices(model, capabilities, there, layers[1])
        source_ids = torch.zeros(3, 5, dtype=torch.long)
        source = target.encode_source(source_ids, torch.ones_like(source_ids))
        cache = target.new_cache(3, 64)
        target.read_source(cache, source)
        outputs = [*decode_tree(target, cache), source.states]
        assert len(outputs) == 4
        assert {output.device for output in outputs} == {HERE}


class PackedInts(nn.Module):
    """As GPTQ's and AWQ's linear layers: no weight, but integers of 4 bits in int32, and a scale per row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scales = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        values = (linear.weight.detach() / self.scales).round().to(torch.int32) + 8
        self.shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        self.qweight = (values.view(len(values), -1, 8) << self.shifts).sum(-1).to(torch.int32)

    def forward(self, hidden: Tensor) -> Tensor:
        values = ((self.qweight[..., None] >> self.shifts) & 15).flatten(1) - 8
        return hidden @ (values * self.scales).T.to(hidden.dtype)


class Float8(nn.Linear):
    """As transformers' FP8 layers: a weight in float8, and scales."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.scales = linear.weight.detach().abs().amax(1, keepdim=True) / 448
        self.weight = nn.Parameter((linear.weight.detach() / self.scales).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ (self.weight.to(hidden.dtype) * self.scales).T


@pytest.mark.parametrize("kind", [PackedInts, Float8])
def test_layers_whose_weights_need_a_gpu(kind: Any) -> None:
    """Stand-ins for layers of GPTQ, AWQ and FP8, whose kernels need one."""
    model: Any = tiny_target("llama", initializer_range=0.3)
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path != "lm_head" and module.in_features % 8 == 0:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, kind(module))
    assert any(isinstance(module, kind) for module in model.modules())
    check_greedy_text(model)


def test_states_that_change_with_the_pass_are_told_from_broken_masks(caplog: pytest.LogCaptureFixture) -> None:
    """What the test above shows with bitsandbytes: weights of 8 bits, and activations scaled by the pass's largest."""

    def quantise(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = inputs[0].abs().amax() / 127
        return ((inputs[0] / scale).round() * scale,)

    def build() -> Any:
        model: Any = tiny_target("llama", initializer_range=0.3)
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_pre_hook(quantise)
        return model

    with pytest.raises(ValueError, match=r"LlamaForCausalLM change by .* not a causal LM"):
        Target(build())  # nothing says that it is quantised
    for say_so in (
        lambda model: setattr(model, "is_quantized", True),
        lambda model: setattr(model.config, "quantization_config", {"quant_method": "int8"}),
        lambda model: setattr(
            model.model.layers[0].mlp, "act_fn", type("Int8", (nn.SiLU,), {"__module__": "torchao.x"})()
        ),
    ):
        model = build()
        say_so(model)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="draftsmith.inference"):
            Target(model)
        assert "LlamaForCausalLM change by" in caplog.text
    for ignored in ("attention_mask", "position_ids"):
        model = build()
        model.is_quantized = True
        ignore_argument(model, ignored)
        with pytest.raises(ValueError, match="does not compute a tree"):
            Target(model)


def test_weights_that_do_not_run_in_inference_mode() -> None:
    """As quanto's of 4 bits: such targets decode without gradients, their text and stream are the model's own."""
    model: Any = tiny_target("llama", initializer_range=0.3)

    def refuse(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Inference tensors do not track version counter.")

    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(refuse)
    target = check_greedy_text(model)
    with target.without_autograd():
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
    prompt = random_prompt(6)
    steps = stream(target, NgramDrafter(), prompt, max_new_tokens=20, do_sample=False)
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    assert [token for step in steps for token in step] == expected[0, 6:].tolist()


TENSOR_PARALLEL = """
import sys, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM
from draftsmith.inference import generate
from draftsmith.inference.drafters.ngram import NgramDrafter
from tests.inference.targets.test_target_placement import check_greedy_text
from tests.tiny_targets import random_prompt, tiny_target

dist.init_process_group("gloo")
for family, num_heads in (("llama", 1), ("gpt_oss", 2)):  # transformers' plan leaves gpt-oss's attention whole
    model = AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/{family}", tp_plan="auto").eval()
    target = check_greedy_text(model)
    assert target.capabilities.layer_specs[0].keys.num_heads == num_heads
    options = {"max_new_tokens": 20, "do_sample": True, "seed": 3}
    sampled = generate(target, NgramDrafter(), random_prompt(6), **options).sequences
    whole = tiny_target(family, initializer_range=0.3)
    assert torch.equal(sampled, generate(whole, None, random_prompt(6), **options).sequences)
    print("decoded", family)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_tensor_parallel(tmp_path: Path) -> None:
    """Two processes hold half of the split weights each, and both decode the whole model's text, greedy and sampled."""
    for family in ("llama", "gpt_oss"):
        tiny_target(family, initializer_range=0.3).save_pretrained(tmp_path / family)
    program = tmp_path / "decode.py"
    program.write_text(TENSOR_PARALLEL)
    assert run_python(*TORCHRUN, "2", str(program), str(tmp_path), PYTHONPATH=str(REPOSITORY)).count("decoded") == 4
