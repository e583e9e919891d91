"""What Target refuses, and with which reason."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from draftsmith.inference import Decoder, Target
from draftsmith.inference.targets.forward_names import read_cache
from draftsmith.training.features.encoding import encode
from tests.inference.plain_passes import calm_target
from tests.inference.tiny_encoder_decoders import tiny_encoder_decoder
from tests.tiny_targets import random_prompt, tiny_target

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make(model_type: str, **settings: Any) -> PreTrainedModel:
    """A random model of 64 tokens, of a family that `tiny_target` does not have."""
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](vocab_size=64, **settings)).eval()


def ignore_argument(model: Any, name: str) -> None:
    """Makes the decoder of `model` deaf to one of its arguments."""
    model.base_model.register_forward_pre_hook(lambda m, args, kwargs: (args, kwargs | {name: None}), with_kwargs=True)


class TestRefusals:
    """What cannot be rolled back or verified as a tree is refused at construction, with the reason."""

    def test_states_that_cannot_be_rolled_back(self) -> None:
        """In a place of their own, and in a cache of its own."""
        tiny, wide = {"hidden_size": 32, "num_hidden_layers": 2}, {"intermediate_size": 64}
        griffin = {"num_attention_heads": 2, "lru_width": 32, "attention_window_size": 8}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}
        layers = ["linear_attention", "full_attention"]
        for model, message in (
            (make("recurrent_gemma", **tiny, **wide, **griffin), r"rolled back|4-D mask"),
            (make("rwkv", **tiny, context_length=32), r"place of their own|no cache"),
            (make("minimax", **tiny, **wide, **heads, layer_types=layers), "rolled back"),
        ):
            with pytest.raises(ValueError, match=message):
                Target(model)

    def test_attention_that_takes_no_tree_mask(self) -> None:
        implementation = "flash_attention_2"
        model = calm_target("llama")
        model.config._attn_implementation_internal = implementation
        with pytest.raises(ValueError, match=rf"'{implementation}'.*sdpa"):
            Target(model)

    def test_training_mode(self) -> None:
        model = calm_target("llama").train()
        with pytest.raises(ValueError, match=r"model\.eval\(\)"):
            Target(model)
        target = Target(model.eval())
        model.train()
        with pytest.raises(ValueError, match=r"model\.eval\(\)"):
            encode(target, random_prompt(3), torch.ones(1, 3))

    @pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
    def test_a_model_that_ignores_masks_or_positions(self, ignored: str) -> None:
        """Whatever the dtype and the weights: weak ones let positions change the last states by less than rounding."""
        for dtype, weights in zip(DTYPES, (0.02, 0.1, 0.5), strict=True):
            model = tiny_target("llama", dtype=dtype, initializer_range=weights)
            ignore_argument(model, ignored)
            with pytest.raises(ValueError, match=NO_TREE):
                Target(model)

    def test_alibi(self) -> None:
        """ALiBi counts slots, so a sibling's slot would change a node's scores; weak weights would hide that."""
        falcon = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        for model in (
            make("mpt", d_model=32, n_heads=4, n_layers=2),
            make("bloom", hidden_size=32, n_head=4, n_layer=2),
            make("falcon", **falcon, alibi=True),
        ):
            with pytest.raises(ValueError, match=f"{type(model).__name__} has ALiBi"):
                Target(model)
        Target(make("falcon", **falcon, alibi=False))

    def test_a_window_that_the_model_applies_by_itself(self) -> None:
        """GPT-Neo's local layers mask slots, whatever mask they are given."""
        types = [[["global", "local"], 1]]
        model = make("gpt_neo", hidden_size=32, num_layers=2, num_heads=4, attention_types=types)
        assert model.config.max_position_embeddings == 2048
        with pytest.raises(ValueError, match="GPTNeoForCausalLM does not"):
            Target(model)

    def test_a_model_that_looks_ahead(self) -> None:
        """Even a little; a model that is no causal LM does not become one by rounding."""
        for dtype, weights in zip(DTYPES, (0.02, 0.1, 0.5), strict=True):
            model = tiny_target("llama", dtype=dtype, initializer_range=weights)
            model.model.norm.register_forward_hook(
                lambda module, args, states: states + 0.02 * states.mean(1, keepdim=True)
            )
            with pytest.raises(ValueError, match="not a causal LM"):
                Target(model)

    def test_only_experts_are_asked_again(self) -> None:
        """Both are wrong at their first tokens; only a router could have been at a near-tie."""

        def look_ahead(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if kwargs["input_ids"][0, 0] == first:
                output["last_hidden_state"] += output.last_hidden_state.mean(1, keepdim=True)

        models = [tiny_target(family) for family in ("mixtral", "llama")]
        for model in models:
            model.base_model.register_forward_hook(look_ahead, with_kwargs=True)
        first = 1
        Target(models[0])
        first = 7
        with pytest.raises(ValueError, match="not a causal LM"):
            Target(models[1])

    @pytest.mark.parametrize(
        ("family", "value", "layer"), [("llama", torch.inf, "k_proj"), ("mixtral", torch.nan, "o_proj")]
    )
    def test_broken_weights(self, family: str, value: float, layer: str) -> None:
        """One of them; a model that computes no numbers is not called one that looks ahead. Keys show in a tree."""
        for dtype in DTYPES:
            model = tiny_target(family, dtype=dtype)
            broken = f"model.layers.1.self_attn.{layer}.weight"
            model.get_parameter(broken).data[3, 3] = value
            with pytest.raises(ValueError, match=rf"{dtype} .*\({broken}\)"):
                Target(model)

    def test_autocast(self) -> None:
        model = tiny_target("llama", initializer_range=0.3)
        prompt = random_prompt(6)
        decoder = Decoder(model)
        expected = decoder.generate(prompt, max_new_tokens=8).sequences
        with torch.autocast("cpu", torch.bfloat16):
            match = r"autocast to torch.bfloat16.* torch.float32"
            with pytest.raises(ValueError, match=match):
                Target(model)
            with pytest.raises(ValueError, match=match):
                decoder.generate(prompt, max_new_tokens=8)
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(Decoder(model).generate(prompt, max_new_tokens=8).sequences, expected)
            Target(tiny_target("llama", dtype=torch.bfloat16))
        assert torch.equal(decoder.generate(prompt, max_new_tokens=8).sequences, expected)


# Hooks of a forward: what a model does to the arguments or to the output of one of its modules.


def read_the_mask_upside_down(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """It takes every 4-D mask for 1 = seen, as some releases of MPT do, and so sees all or nothing."""
    mask = kwargs.get("attention_mask")
    return args, kwargs if mask is None else kwargs | {"attention_mask": torch.full_like(mask, -1e30)}


def measure_distances_in_slots(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Scores fall with the distance in slots, slowly enough that a few of them hardly matter."""
    mask = kwargs["attention_mask"]
    slope = None if mask is None else mask + torch.arange(mask.shape[-1]) * 1e-3
    return args, kwargs | {"attention_mask": slope}


def see_beyond_the_window(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config names a window, and the layers see everything, as Moshi's do."""
    if kwargs.get("attention_mask") is None:
        length = kwargs["input_ids"].shape[1]
        kwargs["attention_mask"] = torch.full((1, 1, length, length), torch.finfo(torch.float32).min).triu(1)
    return args, kwargs


def touch_another_state(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """A convolution state beside keys and values, as hybrids keep."""
    read_cache(kwargs).update_conv_state(torch.zeros(1), 1)


def spoil_trees(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Without a broken weight, masks are to blame."""
    if read_cache(kwargs) is not None:
        output["last_hidden_state"] *= torch.nan


NO_TREE = "compute a tree"
HOOKS: list[tuple[str, str, Any, str]] = [  # family, module, hook, complaint
    ("llama", "model", read_the_mask_upside_down, NO_TREE),
    ("llama", "model.layers.1.self_attn", measure_distances_in_slots, NO_TREE),
    ("mistral", "model", see_beyond_the_window, "sliding_window=8"),
    ("llama", "model.layers.1", touch_another_state, "a state besides"),
    ("llama", "model", spoil_trees, NO_TREE),
]


@pytest.mark.parametrize(
    ("family", "place", "hook", "complaint"), HOOKS, ids=[hook.__name__ for _, _, hook, _ in HOOKS]
)
def test_models_that_go_another_way(family: str, place: str, hook: Any, complaint: str) -> None:
    model = calm_target(family)
    module = model.get_submodule(place)
    takes_output = len(inspect.signature(hook).parameters) == 4
    (module.register_forward_hook if takes_output else module.register_forward_pre_hook)(hook, with_kwargs=True)
    with pytest.raises(ValueError, match=f"{type(model).__name__} .*{complaint}"):
        Target(model)


# Batch-invariant mode, where it cannot be kept.


def test_other_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has 'eager'"):
        Target.of(tiny_target("llama", attn_implementation="eager")).batch_invariant()
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has its own"):
        Target.of(tiny_encoder_decoder("t5")).batch_invariant()
    with pytest.raises(ValueError, match="an expert of MixtralForCausalLM"):
        Target.of(tiny_target("mixtral", dtype=torch.bfloat16)).batch_invariant()


def test_a_layer_that_counts_rows_is_refused() -> None:
    model = tiny_target("llama")
    layer = model.model.layers[2].mlp
    stock = layer.forward

    def forward(hidden: Tensor) -> Tensor:
        found: Tensor = stock(hidden)
        return found * (1 + 1e-6) if hidden.shape[1] > 20 else found

    layer.forward = forward
    with pytest.raises(ValueError, match=r"LlamaForCausalLM in torch.float32 on cpu"):
        Target.of(model).batch_invariant()


def test_packed_weights_are_checked_by_themselves() -> None:
    target = Target.of(tiny_target("llama")).batch_invariant()
    packed = target.with_packed_weights()
    assert packed.is_batch_invariant
    assert packed.min_pass_tokens <= target.min_pass_tokens
    assert packed.capabilities.is_known_invariant is not target.capabilities.is_known_invariant
