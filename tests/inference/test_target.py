"""Target against the model's own cache-less forward: one pass per path, the slow and obvious way."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from tiny_targets import FAMILIES, SLIDING_WINDOW, random_prompt, tiny_target
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from inference.kv_cache import TreeCache
from inference.target import Target
from inference.tree import TokenTree, compute_depths

IMPLEMENTATIONS = ("sdpa", "eager")
BELOW_WINDOW, BEYOND_WINDOW = (1, 3, 4), (9, 14, 21)
ATOL = 1e-4


def calm_target(family: str, **overrides: Any) -> PreTrainedModel:
    """A tiny target with weights of 0.3: at the usual 0.5 it blows plain float32 rounding up to 1e-4."""
    return tiny_target(family, **({"initializer_range": 0.3} | overrides))


def run_plainly(model: PreTrainedModel, tokens: list[int]) -> Any:
    """The model's own forward over one sequence, without cache, mask or position ids."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)


def pad_rows(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [B, L], right-padded with 0, and counts [B]."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return ids, torch.tensor([len(row) for row in rows])


def random_tree(batch_size: int, num_nodes: int, generator: torch.Generator, num_padding: int = 0) -> TokenTree:
    """Random parents per row; the last row's last nodes are padding."""
    parents = torch.full((batch_size, num_nodes), -1)
    for row in range(batch_size):
        for node in range(1, num_nodes - (num_padding if row == batch_size - 1 else 0)):
            parents[row, node] = torch.randint(0, node, (), generator=generator)
    token_ids = torch.randint(2, 128, (batch_size, num_nodes), generator=generator)
    depths = torch.where(parents < 0, 0, compute_depths(parents))
    return TokenTree(token_ids, parents, depths, torch.zeros(batch_size, num_nodes))


def node_path(tree: TokenTree, row: int, node: int) -> list[int]:
    """Node indices from the root to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[row, node])
    return path


def assert_states_close(states: Tensor, wanted: Tensor) -> None:
    """Hidden states of these targets reach 100 and more, so their error is measured against the largest."""
    torch.testing.assert_close(states, wanted, atol=1e-5 * max(1.0, float(wanted.abs().max())), rtol=0)


def check_tree(
    model: PreTrainedModel, texts: list[list[int]], tree: TokenTree, logits: Tensor, features: Tensor
) -> None:
    """Every node's logits and features equal those of a plain pass over the text and the node's path."""
    for row, text in enumerate(texts):
        for node in range(tree.num_nodes):
            path = node_path(tree, row, node)
            if path[0] != 0:
                continue  # padding
            output = run_plainly(model, text + tree.token_ids[row, path].tolist())
            torch.testing.assert_close(logits[row, node], output.logits[0, -1], atol=ATOL, rtol=0)
            wanted = torch.cat([output.hidden_states[layer][0, -1] for layer in (2, 0, 6)])
            assert_states_close(features[row, node], wanted)


@pytest.mark.parametrize("lengths", [BELOW_WINDOW, BEYOND_WINDOW], ids=["below-window", "beyond-window"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_verification_equals_plain_passes_after_branching_commits(
    family: str, implementation: str, lengths: tuple[int, ...]
) -> None:
    model = calm_target(family, attn_implementation=implementation)
    target = Target(model)
    generator = torch.Generator().manual_seed(3)
    texts = [random_prompt(length, seed=length)[0].tolist() for length in lengths]
    ids, counts = pad_rows(texts)
    cache = target.new_cache(batch_size=3, capacity=64)
    output = target.prefill(cache, ids, counts, feature_layers=(2, 0, 6), chunk_size=5)
    assert output.features is not None
    for row, text in enumerate(texts):
        plain = run_plainly(model, text)
        torch.testing.assert_close(output.logits[row, 0], plain.logits[0, -1], atol=ATOL, rtol=0)
        wanted = torch.cat([plain.hidden_states[layer][0] for layer in (2, 0, 6)], dim=-1)
        assert_states_close(output.features[row, : len(text)], wanted)
    for step in range(3):
        tree = random_tree(3, 6, generator, num_padding=2)
        output = target.verify(cache, tree, feature_layers=(2, 0, 6))
        assert output.features is not None
        assert output.logits.isfinite().all()  # padding included
        check_tree(model, texts, tree, output.logits, output.features)
        paths = [node_path(tree, row, node) for row, node in enumerate((3, 5 - step, 3 - step))]
        path, path_counts = pad_rows(paths)
        cache.commit(path, path_counts)
        for row, nodes in enumerate(paths):
            texts[row] += tree.token_ids[row, nodes].tolist()
        cache.length_bound = max(map(len, texts))
        assert cache.lengths.tolist() == [len(text) for text in texts]


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_tree_deeper_than_the_window(family: str) -> None:
    """The window counts positions: a node's ancestors may lie in slots far behind its own position."""
    model = calm_target(family)
    target = Target(model)
    texts = [random_prompt(length, seed=length)[0].tolist() for length in (3, 11)]
    cache = target.new_cache(2, 64)
    target.prefill(cache, *pad_rows(texts))
    depth = SLIDING_WINDOW + 3
    # Two branches side by side: node 2d - 1 and node 2d have depth d.
    parents = torch.tensor([[-1, 0, 0, *range(1, 2 * depth - 1)]]).expand(2, -1)
    token_ids = random_prompt(2 * depth + 1, seed=5, batch_size=2)
    tree = TokenTree(token_ids, parents, compute_depths(parents), torch.zeros(2, 2 * depth + 1))
    assert int(tree.depths.max()) == depth
    output = target.verify(cache, tree, feature_layers=(2, 0, 6))
    assert output.features is not None
    check_tree(model, texts, tree, output.logits, output.features)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_row_and_plain_steps_equal_a_plain_pass(family: str) -> None:
    """B = 1 takes its own, cheaper way through the cache; a tree of a root alone is plain decoding."""
    model = calm_target(family)
    target = Target(model)
    text = random_prompt(6)[0].tolist()
    cache = target.new_cache(batch_size=1, capacity=48)
    logits = target.prefill(cache, torch.tensor([text]), torch.tensor([6])).logits[:, -1]
    for _ in range(2 * SLIDING_WINDOW):
        torch.testing.assert_close(logits[0], run_plainly(model, text).logits[0, -1], atol=ATOL, rtol=0)
        token = logits.argmax(-1)
        text.append(int(token))
        logits = target.verify(cache, TokenTree.from_root(token)).logits[:, -1]
        cache.commit(torch.zeros(1, 1, dtype=torch.long), torch.tensor([1]), is_chain=True)


def test_prefill_continues_a_conversation_and_rows_may_be_left_out() -> None:
    model = calm_target("mistral")
    target = Target(model)
    rows = [random_prompt(length, seed=length)[0].tolist() for length in (12, 7)]
    cache = target.new_cache(batch_size=2, capacity=64)
    target.prefill(cache, *pad_rows([rows[0][:5], rows[1]]), chunk_size=3)
    continuation = torch.tensor([rows[0][5:], [0] * 7])
    output = target.prefill(cache, continuation, torch.tensor([7, 0]), feature_layers=(6,), chunk_size=2)
    assert cache.lengths.tolist() == [12, 7]
    torch.testing.assert_close(output.logits[0, 0], run_plainly(model, rows[0]).logits[0, -1], atol=ATOL, rtol=0)
    root = torch.tensor([5, 6])
    logits = target.verify(cache, TokenTree.from_root(root)).logits
    for row, text in enumerate(rows):
        wanted = run_plainly(model, [*text, int(root[row])]).logits[0, -1]
        torch.testing.assert_close(logits[row, 0], wanted, atol=ATOL, rtol=0)


@pytest.mark.parametrize("chunk_size", [1, 7, 512])
def test_prefill_does_not_depend_on_the_chunk_size(chunk_size: int) -> None:
    target = Target(calm_target("gemma3"))
    ids, counts = pad_rows([random_prompt(length, seed=length)[0].tolist() for length in (20, 3, 14)])
    wanted = target.prefill(target.new_cache(3, 64), ids, counts, feature_layers=(1,), chunk_size=20)
    output = target.prefill(target.new_cache(3, 64), ids, counts, feature_layers=(1,), chunk_size=chunk_size)
    torch.testing.assert_close(output.logits, wanted.logits, atol=ATOL, rtol=0)
    assert output.features is not None
    assert wanted.features is not None
    for row, count in enumerate(counts):
        assert_states_close(output.features[row, :count], wanted.features[row, :count])


@pytest.mark.parametrize("family", FAMILIES)
def test_encode_equals_the_models_own_hidden_states(family: str) -> None:
    model = calm_target(family)
    target = Target(model)
    rows = [random_prompt(length, seed=length)[0].tolist() for length in (4, 19)]
    ids, counts = pad_rows(rows)
    mask = (torch.arange(ids.shape[1]) < counts[:, None]).long()
    output = target.encode(ids, mask, feature_layers=(1, 3, 6))
    for row, text in enumerate(rows):
        plain = run_plainly(model, text)
        wanted = torch.cat([plain.hidden_states[layer][0] for layer in (1, 3, 6)], dim=-1)
        assert_states_close(output.features[row, : len(text)], wanted)
        assert_states_close(output.last_hidden[row, : len(text)], plain.hidden_states[-1][0])
        logits = target.compute_logits(output.last_hidden[row, : len(text)])
        torch.testing.assert_close(logits, plain.logits[0], atol=ATOL, rtol=0)


def test_encode_feeds_a_graph_and_needs_no_features() -> None:
    """Inference tensors cannot be saved for backward; encode's outputs must be ordinary ones."""
    target = Target(calm_target("llama"))
    output = target.encode(random_prompt(5), torch.ones(1, 5, dtype=torch.long))
    assert output.features.shape == (1, 5, 0)
    layer = nn.Linear(32, 32)
    target.compute_logits(layer(output.last_hidden)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().sum() > 0


def test_target_leaves_the_model_as_it_was() -> None:
    model = calm_target("gemma3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    target = Target(model)
    cache = target.new_cache(1, 32)
    target.prefill(cache, random_prompt(4), torch.tensor([4]))
    assert target.model is model
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masks_are_float_and_one_per_layer_type(implementation: str) -> None:
    """A boolean mask would be ADDED by eager attention, silently."""
    allowed = torch.tensor([[[True, False, False], [True, True, False], [True, True, True]]])
    positions = torch.tensor([[0, 1, 8]])
    for family, kind in (("llama", Tensor), ("mistral", Tensor), ("gemma3", dict)):
        masks = Target(calm_target(family, attn_implementation=implementation)).masks_from_allowed(
            allowed, positions, positions
        )
        assert isinstance(masks, kind)
        for mask in masks.values() if isinstance(masks, dict) else [masks]:
            assert mask.dtype == torch.float32
            assert mask.shape == (1, 1, 3, 3)
        if family == "gemma3":
            assert set(masks) == {"full_attention", "sliding_attention"}
    windowed = Target(calm_target("mistral")).masks_from_allowed(allowed, positions, positions)
    # Window 8: position 8 still sees 1, not 0, and the gap in the slots does not count.
    assert (windowed[0, 0] == 0).tolist() == [[True, False, False], [True, True, False], [False, True, True]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_targets_work(dtype: torch.dtype) -> None:
    target = Target(calm_target("qwen3", dtype=dtype, initializer_range=0.1))
    cache = target.new_cache(2, 32)
    output = target.prefill(cache, random_prompt(5, batch_size=2), torch.tensor([5, 3]), feature_layers=(3,))
    assert output.logits.dtype == dtype
    assert output.features is not None
    assert output.features.dtype == dtype
    tree = random_tree(2, 4, torch.Generator().manual_seed(0), num_padding=1)
    assert target.verify(cache, tree).logits.isfinite().all()


def test_reused_slots_hold_no_trace() -> None:
    """A cache that was used for something longer, then reset, gives what a fresh one gives."""
    target = Target(calm_target("mistral"))
    prompt, counts = random_prompt(10, batch_size=2), torch.tensor([10, 6])
    tree = random_tree(2, 5, torch.Generator().manual_seed(1))
    fresh, used = target.new_cache(2, 64), target.new_cache(2, 64)
    target.prefill(used, random_prompt(40, seed=9, batch_size=2), torch.tensor([40, 40]))
    target.verify(used, random_tree(2, 8, torch.Generator().manual_seed(2)))
    used.reset()
    for buffer in used._buffers:
        buffer[:, :, :, 20:] = 1e4  # slots that no token of this test reaches
    outputs = []
    for cache in (fresh, used):
        first = target.prefill(cache, prompt, counts).logits
        outputs.append(torch.cat([first, target.verify(cache, tree).logits], dim=1))
    assert outputs[1].isfinite().all()
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=0)


def test_a_fresh_cache_is_zeroed() -> None:
    """Uninitialised memory may hold NaN, and 0 * NaN poisons attention even where the mask hides it."""
    cache = Target(calm_target("llama")).new_cache(2, 32)
    assert all(bool((buffer == 0).all()) for buffer in cache._buffers)


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


class TestLogits:
    """The way from the last hidden state to the logits differs by family."""

    @staticmethod
    def check(model: PreTrainedModel) -> Target:
        target = Target(model.eval())
        text = random_prompt(5, vocab_size=64)
        output = target.encode(text, torch.ones_like(text))
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
        with pytest.raises(ValueError, match=r"2 tokens behind 15 exceed .* 16 positions \(max_position_emb"):
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


class TestRefusals:
    """What cannot be rolled back or verified as a tree is refused at construction, with the reason."""

    tiny: ClassVar[dict[str, Any]] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
    }

    def test_state_space_model(self) -> None:
        model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))
        with pytest.raises(ValueError, match="MambaForCausalLM has layers of a kind that cannot be rolled back"):
            Target(model.eval())

    def test_linear_attention(self) -> None:
        config = Qwen3NextConfig(
            **self.tiny,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
        )
        with pytest.raises(ValueError, match=r"rolled back after a rejected draft.*\(linear_attention\)"):
            Target(Qwen3NextForCausalLM(config).eval())

    def test_recurrent_layers(self) -> None:
        # Three layers, so that one of them is attention: older releases fail inside the model without any.
        config = RecurrentGemmaConfig(
            **self.tiny | {"num_hidden_layers": 3}, num_attention_heads=2, lru_width=32, head_dim=16
        )
        with pytest.raises(ValueError, match="rolled back"):
            Target(RecurrentGemmaForCausalLM(config).eval())

    def test_encoder_decoder(self) -> None:
        model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=1, num_heads=2))
        with pytest.raises(ValueError, match="encoder-decoder"):
            Target(model.eval())

    @pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
    def test_attention_that_takes_no_tree_mask(self, implementation: str) -> None:
        model = calm_target("llama")
        model.config._attn_implementation_internal = implementation
        with pytest.raises(ValueError, match=rf"'{implementation}' cannot take a tree mask.*sdpa"):
            Target(model)

    def test_training_mode(self) -> None:
        model = calm_target("llama").train()
        with pytest.raises(ValueError, match=r"model\.eval\(\)"):
            Target(model)
        target = Target(model.eval())
        model.train()
        with pytest.raises(ValueError, match=r"model\.eval\(\)"):
            target.encode(random_prompt(3), torch.ones(1, 3))

    def test_no_language_model(self) -> None:
        with pytest.raises(ValueError, match=r"AutoModelForCausalLM\), got Linear"):
            Target(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="LlamaModel has no LM head"):
            Target(calm_target("llama").base_model)

    def test_layers_that_share_a_cache(self) -> None:
        class LazyLlama(LlamaForCausalLM):
            def __init__(self, config: LlamaConfig) -> None:
                super().__init__(config)
                self.model.layers[1].self_attn.layer_idx = 0

        with pytest.raises(ValueError, match=r"layers \[1\] of LazyLlama never write"):
            Target(LazyLlama(calm_target("llama").config).eval())

    def test_a_model_that_ignores_masks_or_positions(self) -> None:
        class DeafLlama(LlamaForCausalLM):
            def __init__(self, config: LlamaConfig) -> None:
                super().__init__(config)
                self.model.register_forward_pre_hook(lambda m, a, k: (a, k | {self.ignored: None}), with_kwargs=True)

        for ignored in ("attention_mask", "position_ids"):
            model = DeafLlama(calm_target("llama").config).eval()
            model.ignored = ignored
            with pytest.raises(ValueError, match="does not compute a tree as separate continuations"):
                Target(model)

    def test_a_model_that_reads_the_mask_upside_down(self) -> None:
        class InvertedLlama(LlamaForCausalLM):
            """Takes every 4-D mask for 1 = seen, as some releases of MPT do, and so sees all or nothing."""

            def __init__(self, config: LlamaConfig) -> None:
                super().__init__(config)
                self.model.register_forward_pre_hook(self.invert, with_kwargs=True)

            @staticmethod
            def invert(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
                mask = kwargs.get("attention_mask")
                return args, kwargs if mask is None else kwargs | {"attention_mask": torch.full_like(mask, -1e30)}

        with pytest.raises(ValueError, match="does not compute a tree as separate continuations"):
            Target(InvertedLlama(calm_target("llama").config).eval())

    def test_positions_by_distance_in_slots(self) -> None:
        """ALiBi counts slots, so a sibling's slot would change a node's scores."""
        config = MptConfig(vocab_size=64, d_model=32, n_heads=4, n_layers=2, initializer_range=0.3)
        config._attn_implementation = "eager"
        with pytest.raises(ValueError, match=r"MptForCausalLM does not (compute a tree|run with a 4-D mask)"):
            Target(MptForCausalLM(config).eval())

    def test_a_model_that_takes_no_4d_mask(self) -> None:
        config = BloomConfig(vocab_size=64, hidden_size=32, n_head=4, n_layer=2)
        config._attn_implementation = "eager"
        with pytest.raises(ValueError, match="BloomForCausalLM does not run with a 4-D mask"):
            Target(BloomForCausalLM(config).eval())

    def test_a_state_that_no_config_names(self) -> None:
        class ConvolvedLlama(LlamaForCausalLM):
            """Keeps a convolution state beside keys and values, as hybrids do."""

            def __init__(self, config: LlamaConfig) -> None:
                super().__init__(config)
                self.model.layers[1].register_forward_pre_hook(self.touch, with_kwargs=True)

            @staticmethod
            def touch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
                kwargs["past_key_values"].update_conv_state(torch.zeros(1), 1)

        with pytest.raises(ValueError, match="ConvolvedLlama keeps a state besides keys and values"):
            Target(ConvolvedLlama(calm_target("llama").config).eval())

    def test_unknown_layer_and_empty_prompt(self) -> None:
        target = Target(calm_target("llama"))
        with pytest.raises(ValueError, match=r"hidden states \[7\] do not exist: a target of 6 layers"):
            target.encode(random_prompt(3), torch.ones(1, 3), feature_layers=(7,))
        with pytest.raises(ValueError, match="empty prompt"):
            target.prefill(target.new_cache(1, 8), torch.zeros(1, 0, dtype=torch.long), torch.tensor([0]))

    def test_full_cache(self) -> None:
        target = Target(calm_target("llama"))
        cache = target.new_cache(1, 8)
        target.prefill(cache, random_prompt(6), torch.tensor([6]))
        with pytest.raises(ValueError, match="holds 8 slots per row, but 3 new tokens behind up to 6"):
            target.verify(cache, random_tree(1, 3, torch.Generator().manual_seed(0)))


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
