"""Target on models that go their own way: adapters, more than an LM head, position limits; and `Target.of`."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from draftsmith.inference import Decoder, DynamicTree, Target, generate
from draftsmith.inference.cache.kv_cache import Span
from draftsmith.inference.targets import target as target_module
from draftsmith.inference.trees.token_tree import TokenTree
from tests.inference.plain_passes import ATOL, assert_states_close, calm_target, prefill_in_parts, run_plainly
from tests.inference.tiny_encoder_decoders import tiny_encoder_decoder
from tests.lossless.near_tie import assert_same_text
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target


# peft asks transformers by a name that transformers has deprecated.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_virtual_prompt_tokens_are_refused() -> None:
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    prompted = peft.get_peft_model(
        calm_target("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ValueError, match="virtual prompt tokens"):
        Target(prompted.eval())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("pack_weights", [False, True], ids=["own weights", "packed"])
@pytest.mark.parametrize("family", ["qwen3", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_peft_texts_follow_the_adapters(family: str, *, pack_weights: bool) -> None:
    """One decoder, before and after adapters are switched, turned off and merged: always the model's own text."""
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    settings: dict[str, Any] = {
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": family == "gpt2",
    }
    layers = ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(calm_target(family), peft.LoraConfig(target_modules=layers, **settings), "first").eval()
    own = peft.LoraConfig(target_modules=layers[:1], r=4, lora_alpha=64, **settings)
    model.add_adapter("second", own)
    drafter = ScriptedDrafter([torch.zeros(1, dtype=torch.long)], VOCAB_SIZE)
    tree = DynamicTree(depth=4, top_k=4, num_nodes=24)
    decoder = Decoder(Target(model), drafter, tree=tree, pack_weights=pack_weights)
    prompt = random_prompt(6)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}

    def decode() -> tuple[int, ...]:
        expected = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
        drafter.texts = [expected[0]]
        output = decoder.generate(prompt, **options)
        assert_same_text(model, expected, output.sequences)
        assert output.stats.acceptance_length > 1.5
        return tuple(output.sequences[0].tolist())

    first = decode()
    model.set_adapter("second")
    second = decode()
    with model.disable_adapter():
        plain = decode()
    assert len({first, second, plain}) == 3, "the adapters change nothing, so this test would show nothing"
    model.set_adapter("first")
    assert decode() == first
    model.base_model.set_adapter(["first", "second"])
    assert decode() not in {first, second, plain}
    model.set_adapter("first")
    with peft.helpers.rescale_adapter_scale(model, 0.1):
        assert decode() != first
    for change in (model.merge_adapter, model.unmerge_adapter, lambda: model.add_adapter("third", own)):
        change()
        if pack_weights and change != model.unmerge_adapter:
            with pytest.raises(ValueError, match="make a new Decoder"):
                decode()
        else:
            assert decode() == first


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_that_wait_for_a_token() -> None:
    """PEFT tells an aLoRA its offsets from hooks of its own generate and forward; without them it never applies."""
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    waiting = peft.LoraConfig(alora_invocation_tokens=[5, 6], **settings)
    with pytest.raises(ValueError, match=r"'first' is an aLoRA \(alora_invocation_tokens=\[5, 6\]\)"):
        Target(peft.get_peft_model(calm_target("llama"), waiting, "first").eval())

    model = peft.get_peft_model(calm_target("llama"), peft.LoraConfig(**settings), "first").eval()
    decoder = Decoder(model)
    prompt = random_prompt(6)
    expected = decoder.generate(prompt, max_new_tokens=8).sequences
    model.add_adapter("late", waiting)
    for start in (decoder.generate, decoder.stream):
        with pytest.raises(ValueError, match=r"'late' is an aLoRA.*delete_adapter\('late'\)"):
            start(prompt, max_new_tokens=8)
    model.delete_adapter("late")
    assert torch.equal(decoder.generate(prompt, max_new_tokens=8).sequences, expected)


def test_a_model_that_does_more_than_its_lm_head_runs_whole_and_says_so() -> None:
    class ShiftedLlama(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + torch.arange(output.logits.shape[-1]) * 0.1
            return output

    model = ShiftedLlama(calm_target("llama").config).eval()
    target = Target(model)
    text = random_prompt(9)[0].tolist()
    cache = target.new_cache(1, 32)
    logits, features = prefill_in_parts(
        target, cache, torch.tensor([text]), torch.tensor([9]), 4, feature_layers=(1, 6)
    )
    plain = run_plainly(model, text)
    torch.testing.assert_close(logits[0], plain.logits[0, -1], atol=ATOL, rtol=0)
    wanted = torch.cat([plain.hidden_states[1], plain.hidden_states[6]], dim=-1)
    assert_states_close(features, wanted)
    cache.open_slots(1, Span(9, 9))
    verified = target.verify(cache, TokenTree.from_root(torch.tensor([5]))).logits[0, 0]
    torch.testing.assert_close(verified, run_plainly(model, [*text, 5]).logits[0, -1], atol=ATOL, rtol=0)
    with pytest.raises(ValueError, match="ShiftedLlama does more"):
        target.compute_logits(torch.zeros(1, 32))


def test_every_layer_types_rope_counts() -> None:
    rope = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    target = Target(calm_target("gemma3", max_position_embeddings=32, rope_parameters=rope))
    assert target.max_length == 32
    assert "dynamic" in target.length_limit_reason


# One target per model, which is examined anew after it has changed, and which keeps no model alive.


@pytest.fixture
def num_examined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the model's name at every examination."""
    names: list[str] = []

    def counted(examine: Any) -> Any:
        def call(model: Any, *args: Any) -> Any:
            names.append(type(model).__name__)
            return examine(model, *args)

        return call

    for name in ("probe_model", "probe_encoder_decoder"):
        monkeypatch.setattr(target_module, name, counted(getattr(target_module, name)))
    return names


def test_a_model_is_examined_once(num_examined: list[str]) -> None:
    for model in (tiny_target("gemma3"), copy.deepcopy(tiny_encoder_decoder("t5"))):  # nobody else examined the copy
        num_examined.clear()
        first = Target.of(model)
        assert Target.of(model) is first
        assert Target.of(first) is first
        specs, vocab_size = first.capabilities.layer_specs, first.vocab_size
        del first
        again = Target.of(model)  # nobody held the first one
        assert (again.capabilities.layer_specs, again.vocab_size) == (specs, vocab_size)
        assert Target(model) is not again
        assert len(num_examined) == 2  # the last line asked for it


def add_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    model.eval()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda model: model.to(torch.bfloat16),
    "config": lambda model: setattr(model.config, "max_position_embeddings", 128),
    "adapter": add_adapter,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_examined_again(change: str, num_examined: list[str]) -> None:
    model = tiny_target("llama")
    first = Target.of(model)
    CHANGES[change](model)
    second = Target.of(model)
    assert second is not first
    assert len(num_examined) == 2
    assert second.dtype == model.dtype
    assert second.max_length == model.config.max_position_embeddings
    assert second.vocab_size == model.config.vocab_size


def test_no_model_is_kept_alive() -> None:
    model = tiny_target("llama")
    generate(model, None, random_prompt(4, vocab_size=90), max_new_tokens=3, do_sample=False)
    target = Target.of(model)
    held = weakref.ref(model), weakref.ref(target)
    del model, target
    gc.collect()
    assert [reference() for reference in held] == [None, None]
