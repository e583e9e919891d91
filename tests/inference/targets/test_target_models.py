"""Target on models that go their own way: adapters, scaled or capped logits, position limits, learned positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

from inference import Decoder, DynamicTree
from inference.cache.tree_cache import TreeCache
from inference.targets.encoding import encode
from inference.targets.target import Target
from inference.trees.token_tree import TokenTree, compute_depths
from tests.inference.plain_passes import ATOL, assert_states_close, calm_target, run_plainly
from tests.lossless.near_tie import assert_same_text
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt


# peft asks transformers by a name that transformers has deprecated.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_models_keep_their_adapters() -> None:
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    model = calm_target("llama")
    text = random_prompt(6)[0].tolist()
    plain = run_plainly(model, text).logits[0, -1]
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    target = Target(adapted)
    assert target.model is adapted
    logits = target.prefill(target.new_cache(1, 16), torch.tensor([text]), torch.tensor([6])).logits[0, 0]
    torch.testing.assert_close(logits, run_plainly(adapted, text).logits[0, -1], atol=ATOL, rtol=0)
    assert (logits - plain).abs().max() > 0.1
    with adapted.disable_adapter():
        logits = target.prefill(target.new_cache(1, 16), torch.tensor([text]), torch.tensor([6])).logits[0, 0]
    torch.testing.assert_close(logits, plain, atol=ATOL, rtol=0)
    prompted = peft.get_peft_model(
        calm_target("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ValueError, match="virtual prompt tokens"):
        Target(prompted.eval())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_peft_texts_follow_the_adapters(family: str) -> None:
    """One decoder, before and after adapters are switched, turned off and merged: always the model's own text."""
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    settings: dict[str, Any] = {
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": family == "gpt2",
    }
    layers = ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(calm_target(family), peft.LoraConfig(target_modules=layers, **settings), "first").eval()
    model.add_adapter("second", peft.LoraConfig(target_modules=layers[:1], r=4, lora_alpha=64, **settings))
    drafter = ScriptedDrafter([torch.zeros(1, dtype=torch.long)], VOCAB_SIZE)
    decoder = Decoder(Target(model), drafter, tree=DynamicTree(depth=4, top_k=4, num_nodes=24))
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


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", ["adapter_names", "alora_offsets"])
def test_arguments_that_peft_reads_itself(name: str) -> None:
    """PEFT hooks them into its own generate, in which nothing is decoded."""
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(calm_target("llama"), config, "one").eval()
    model.add_adapter("two", config)
    decoder = Decoder(model)
    prompts = random_prompt(6, batch_size=2)
    value = ["one", "two"] if name == "adapter_names" else [3, 3]
    for one in (decoder, Decoder(calm_target("llama"))):
        with pytest.raises(ValueError, match=rf"{name} is not supported.*set_adapter"):
            one.generate(prompts, max_new_tokens=8, **{name: value})
    assert decoder.generate(prompts, max_new_tokens=8, **{name: None}).sequences.shape == (2, 14)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_arguments_that_another_peft_reads_itself() -> None:
    model = calm_target("llama")
    model.special_peft_forward_args = {"rank_offsets"}
    with pytest.raises(ValueError, match=r"rank_offsets is not supported.*set_adapter"):
        Decoder(model).generate(random_prompt(6), max_new_tokens=8, rank_offsets=[1])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_that_wait_for_a_token() -> None:
    """PEFT tells an aLoRA its offsets from hooks of its own generate and forward; without them it never applies."""
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    if "alora_invocation_tokens" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip("this release of peft has no aLoRA")
    waiting = peft.LoraConfig(alora_invocation_tokens=[5, 6], **settings)
    with pytest.raises(ValueError, match=r"'first' is an aLoRA \(alora_invocation_tokens=\[5, 6\]\).*Use LoRA"):
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


class TestLogits:
    """The way from the last hidden state to the logits differs by family."""

    @staticmethod
    def check(model: PreTrainedModel) -> Target:
        target = Target(model.eval())
        text = random_prompt(5, vocab_size=64)
        output = encode(target, text, torch.ones_like(text))
        wanted = run_plainly(model, text[0].tolist()).logits
        torch.testing.assert_close(target.compute_logits(output.last_hidden), wanted, atol=ATOL, rtol=0)
        return target

    def test_soft_capping(self) -> None:
        model = calm_target("gemma3", final_logit_softcapping=2.0)
        target = self.check(model)
        assert target.compute_logits(torch.randn(9, 32) * 100).abs().max() <= 2.0

    def test_granite_divides_and_cohere_multiplies(self) -> None:
        shape: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            "initializer_range": 0.5,
        }
        self.check(GraniteForCausalLM(GraniteConfig(logits_scaling=8.0, **shape)))
        self.check(CohereForCausalLM(CohereConfig(logit_scale=0.0625, **shape)))

    def test_a_model_that_does_more_runs_whole_and_says_so(self) -> None:
        class ShiftedLlama(LlamaForCausalLM):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                output = super().forward(*args, **kwargs)
                output.logits = output.logits + torch.arange(output.logits.shape[-1]) * 0.1
                return output

        model = ShiftedLlama(calm_target("llama").config).eval()
        target = Target(model)
        text = random_prompt(9)[0].tolist()
        cache = target.new_cache(1, 32)
        output = target.prefill(cache, torch.tensor([text]), torch.tensor([9]), feature_layers=(1, 6), chunk_size=4)
        plain = run_plainly(model, text)
        torch.testing.assert_close(output.logits[0, 0], plain.logits[0, -1], atol=ATOL, rtol=0)
        assert output.features is not None
        wanted = torch.cat([plain.hidden_states[1], plain.hidden_states[6]], dim=-1)
        assert_states_close(output.features, wanted)
        verified = target.verify(cache, TokenTree.from_root(torch.tensor([5]))).logits[0, 0]
        torch.testing.assert_close(verified, run_plainly(model, [*text, 5]).logits[0, -1], atol=ATOL, rtol=0)
        with pytest.raises(ValueError, match="ShiftedLlama does more between its last hidden state and its logits"):
            target.compute_logits(torch.zeros(1, 32))


class TestLengthLimit:
    def test_position_limit_of_the_config(self) -> None:
        target = Target(calm_target("llama", max_position_embeddings=16))
        assert target.max_length == 16
        cache = target.new_cache(1, 64)
        target.prefill(cache, random_prompt(15), torch.tensor([15]))
        with pytest.raises(ValueError, match=r"2 tokens after 15 exceed .* 16 positions \(max_position_emb"):
            target.prefill(cache, random_prompt(2), torch.tensor([2]))

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            {
                "rope_type": "longrope",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 16,
            },
        ],
        ids=["dynamic", "longrope"],
    )
    def test_rope_that_reads_the_whole_pass_ends_at_its_switch(self, rope: dict[str, Any]) -> None:
        limit = 16 if rope["rope_type"] == "dynamic" else 64
        model = calm_target("llama", max_position_embeddings=limit, rope_parameters=rope)
        target = Target(model)
        assert target.max_length == 16
        assert rope["rope_type"] in target.length_limit_reason
        # Up to the switch the tree equals one pass, also when its deepest nodes would lie beyond the switch.
        text = random_prompt(13)[0].tolist()
        cache = target.new_cache(1, 64)
        target.prefill(cache, torch.tensor([text]), torch.tensor([13]))
        parents = torch.tensor([[-1, 0, 1, 2, 3, 4]])
        tree = TokenTree(random_prompt(6, seed=4), parents, compute_depths(parents), torch.zeros(1, 6))
        logits = target.verify(cache, tree).logits
        for node in range(3):  # positions 13, 14, 15
            wanted = run_plainly(model, text + tree.token_ids[0, : node + 1].tolist()).logits[0, -1]
            torch.testing.assert_close(logits[0, node], wanted, atol=ATOL, rtol=0)

    def test_every_layer_types_rope_counts(self) -> None:
        rope = {
            "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        target = Target(calm_target("gemma3", max_position_embeddings=32, rope_parameters=rope))
        assert target.max_length == 32
        assert "dynamic" in target.length_limit_reason


def test_learned_positions_and_scaled_embeddings() -> None:
    """GPT-2 (learned absolute positions) and Gemma (embeddings scaled inside the model) go the same way."""
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=None))
    gemma = GemmaForCausalLM(
        GemmaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.5,
        )
    )
    for model in (gpt2.eval(), gemma.eval()):
        target = Target(model)
        text = random_prompt(5, vocab_size=64)[0].tolist()
        cache: TreeCache = target.new_cache(1, 32)
        target.prefill(cache, torch.tensor([text]), torch.tensor([5]))
        tree = TokenTree(
            torch.tensor([[7, 8, 9]]), torch.tensor([[-1, 0, 0]]), torch.tensor([[0, 1, 1]]), torch.zeros(1, 3)
        )
        output = target.verify(cache, tree, feature_layers=(0,))
        for node, path in enumerate(([7], [7, 8], [7, 9])):
            plain = run_plainly(model, text + path)
            torch.testing.assert_close(output.logits[0, node], plain.logits[0, -1], atol=ATOL, rtol=0)
            assert output.features is not None
            assert_states_close(output.features[0, node], plain.hidden_states[0][0, -1])
