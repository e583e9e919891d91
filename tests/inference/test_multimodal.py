"""Prompts with images and sounds: the text after them is that of transformers' `generate`, with every drafter."""

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from draftsmith.heads import create_heads
from draftsmith.inference import (
    CustomGenerate,
    Decoder,
    Drafter,
    NgramDrafter,
    SmallModelDrafter,
    StaticTree,
    Target,
    generate,
    stream,
)
from draftsmith.inference.pipelined.decoder import PipelinedDecoder
from draftsmith.inference.targets.layer_groups import tie_layers
from draftsmith.inference.targets.model_config import find_auto_class
from draftsmith.inference.targets.multimodal import read_media
from draftsmith.inference.targets.ragged import RaggedRows
from draftsmith.inference.trees.batch_tree import BatchTree
from draftsmith.inference.trees.survival import Survival
from draftsmith.training.features.encoding import encode
from tests import recurrent_families
from tests.inference.runners.test_cuda_graphs import capture
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_multimodal import IMAGE, VIDEO, multimodal_target, prompts_with_media, tiny_multimodal
from tests.tiny_targets import VOCAB_SIZE, tiny_target

SEEING = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "smolvlm")
HEARING = ("qwen2_audio",) if hasattr(transformers, "Qwen2AudioModel") else ()  # transformers 5.4 has none
FAMILIES = (*SEEING, *HEARING)
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30}
# Words, an image of height x width patches, or none, and words.
ROWS = ((5, (4, 8), 6), (3, None, 4), (9, (4, 4), 3))
TREE = StaticTree([[0], [1], [2], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


@cache
def expected_text(family: str, rows: Any = ROWS) -> Tensor:
    return multimodal_target(family).model.generate(**prompts_with_media(family, rows), **OPTIONS)


def scripted(family: str, rows: Any = ROWS) -> ScriptedDrafter:
    """A drafter that knows the text without its padding."""
    mask = prompts_with_media(family, rows)["attention_mask"]
    texts = [text[int((row == 0).sum()) :] for text, row in zip(expected_text(family, rows), mask, strict=True)]
    return ScriptedDrafter(texts, VOCAB_SIZE)


@pytest.mark.parametrize("family", FAMILIES)
class TestGreedyText:
    def test_plain_text_is_that_of_transformers(self, family: str) -> None:
        expected, inputs = expected_text(family), prompts_with_media(family, ROWS)
        assert torch.equal(generate(multimodal_target(family), None, **inputs, **OPTIONS).sequences, expected)
        medium = next(name for name in ("pixel_values", "input_features") if name in inputs)
        others = generate(multimodal_target(family), None, **inputs | {medium: -inputs[medium]}, **OPTIONS).sequences
        new = expected[:, inputs["input_ids"].shape[1] :]
        has_medium = torch.tensor([size is not None for _, size, _ in ROWS])
        assert torch.equal((others != expected).any(1), has_medium), "another image gives another text"
        assert all(len(row.unique()) > 8 for row in new), "the texts keep changing"

    def test_drafted_text_is_that_of_transformers(self, family: str) -> None:
        """Also where a row ends and leaves the others their positions."""
        target, inputs = multimodal_target(family), prompts_with_media(family, ROWS)
        expected = expected_text(family)
        ended = {**OPTIONS, "eos_token_id": int(expected[0, -25])}
        for options, text in ((OPTIONS, expected), (ended, target.model.generate(**inputs, **ended))):
            output = generate(target, scripted(family), **inputs, tree=TREE, **options)
            assert torch.equal(output.sequences, text)
            assert output.stats.acceptance_length > 1.5


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_long_prompts_with_images(family: str) -> None:
    """Longer than a view of the cache, with a window too: the proof on the first of them reads beyond it. (A target of
    its own, of which nothing is proved.)"""
    target, inputs = Target(tiny_multimodal(family)), prompts_with_media(family, ((100, (4, 8), 6),))
    expected = target.model.generate(**inputs, **OPTIONS)
    assert torch.equal(generate(target, NgramDrafter(), **inputs, **OPTIONS).sequences, expected)


def drafter_of(kind: str, target: Target) -> Drafter:
    if kind == "ngram":
        return NgramDrafter()
    if kind == "small model":
        return SmallModelDrafter(tiny_target("llama", num_hidden_layers=1))
    settings = {"kangaroo": {"exit_layer": 2}, "eagle3": {"feature_layers": [1, 2, 3]}}.get(kind, {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create_heads(kind, target, **settings).eval()


@pytest.mark.parametrize("kind", ["ngram", "small model", "eagle3", "mtp", "medusa", "kangaroo"])
def test_every_drafter_reads_prompts_with_images(kind: str) -> None:
    family = "qwen2_5_vl"
    target, inputs = multimodal_target(family), prompts_with_media(family, ROWS)
    tree = "chain:3" if kind == "ngram" else "dynamic:3,4,12"
    drafter = drafter_of(kind, target)
    assert torch.equal(generate(target, drafter, **inputs, tree=tree, **OPTIONS).sequences, expected_text(family))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_rows_with_images_share_a_budget_of_nodes(family: str) -> None:
    """Positions after an image are no slots, on each of three axes in Qwen's models. The last row is trusted least."""
    target, inputs, predict = multimodal_target(family), prompts_with_media(family, ROWS), Survival.predict
    trust = torch.tensor([[1.0], [2.0], [9.0]])
    with (
        patch.object(Survival, "predict", lambda own, tree: predict(own, tree) ** trust[: len(tree.parents)]),
        patch.object(RaggedRows, "pack", autospec=True, side_effect=RaggedRows.pack) as pack,
    ):
        output = generate(target, scripted(family), **inputs, tree=BatchTree(), **OPTIONS)
    assert torch.equal(output.sequences, expected_text(family))
    assert pack.call_count > 4


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_sampled_text_does_not_depend_on_the_drafts(family: str) -> None:
    target, inputs = multimodal_target(family), prompts_with_media(family, ROWS)
    options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 20, "seed": 3}
    plain = generate(target, None, **inputs, **options).sequences
    assert not torch.equal(plain[:, :-10], expected_text(family)[:, : plain.shape[1] - 10])
    drafter = NgramDrafter()
    assert torch.equal(generate(target, drafter, **inputs, tree="chain:3", **options).sequences, plain)
    texts = [text[int((row == 0).sum()) :] for text, row in zip(plain, inputs["attention_mask"], strict=True)]
    output = generate(target, ScriptedDrafter(texts, VOCAB_SIZE), **inputs, tree=TREE, **options)
    assert torch.equal(output.sequences, plain)
    assert output.stats.acceptance_length > 1.5


def test_a_stream_and_several_texts_of_one_image() -> None:
    target, inputs = multimodal_target("qwen2_5_vl"), prompts_with_media("qwen2_5_vl")
    plain = generate(target, None, **inputs, **OPTIONS).sequences
    steps = [
        token for tokens in stream(target, NgramDrafter(), **inputs, tree="chain:3", **OPTIONS) for token in tokens
    ]
    assert steps == plain[0, inputs["input_ids"].shape[1] :].tolist()
    inputs = prompts_with_media("llava")
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 12, "seed": 5}
    texts = generate(multimodal_target("llava"), None, **inputs, **options).sequences
    assert not torch.equal(texts[0], texts[1])
    drafted = generate(multimodal_target("llava"), NgramDrafter(), **inputs, tree="chain:3", **options).sequences
    assert torch.equal(drafted, texts)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_transformers_own_generate_takes_a_drafter(family: str) -> None:
    target, inputs = multimodal_target(family), prompts_with_media(family, ROWS)
    method = CustomGenerate(scripted(family), tree=TREE)
    assert torch.equal(target.model.generate(**inputs, custom_generate=method, **OPTIONS), expected_text(family))
    assert method.stats.acceptance_length > 1.5
    text = prompts_with_media(family, ((6, None, 3),))
    expected = target.model.generate(**text, **OPTIONS)
    assert torch.equal(target.model.generate(**text, custom_generate=CustomGenerate(None), **OPTIONS), expected)


@pytest.mark.skipif(
    "qwen3_5" not in recurrent_families.NAMES, reason="this release of transformers has no states for it"
)
class TestRecurrentTargets:
    """Layers with recurrent states beside attention with several axes of positions."""

    @pytest.mark.parametrize("rows", [((5, (4, 8), 6),), ((5, (4, 8), 6), (3, None, 18))], ids=["one", "two"])
    def test_drafted_text_is_that_of_transformers(self, rows: Any) -> None:
        target, inputs = multimodal_target("qwen3_5"), prompts_with_media("qwen3_5", rows)
        expected = expected_text("qwen3_5", rows)
        assert torch.equal(generate(target, None, **inputs, **OPTIONS).sequences, expected)
        output = generate(target, scripted("qwen3_5", rows), **inputs, tree=TREE, **OPTIONS)
        assert torch.equal(output.sequences, expected)
        assert output.stats.acceptance_length > 1.5
        drafted = generate(target, drafter_of("eagle3", target), **inputs, tree="dynamic:3,4,12", **OPTIONS)
        assert torch.equal(drafted.sequences, expected)

    def test_rows_with_padding_are_refused(self) -> None:
        inputs = prompts_with_media("qwen3_5", ROWS)
        with pytest.raises(ValueError, match="cannot have padding"):
            generate(multimodal_target("qwen3_5"), None, **inputs, **OPTIONS)


class TestPass:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_features_are_the_models_hidden_states(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        target, inputs = multimodal_target(family), prompts_with_media(family, ROWS)
        found: list[Any] = []

        def watch(*args: Any, **kwargs: Any) -> Any:
            found.append((args[1], read_media(*args, **kwargs)))
            return found[-1][1]

        monkeypatch.setattr("draftsmith.inference.prefill.read_media", watch)
        generate(target, scripted(family), **inputs, tree=TREE, **OPTIONS)
        output = found[0][1]
        with torch.no_grad():
            states = target.model(**inputs, output_hidden_states=True).hidden_states
        wanted = torch.cat([states[1], states[2]], dim=-1)
        for row, mask in enumerate(inputs["attention_mask"]):
            count = int(mask.sum())
            torch.testing.assert_close(output.features[row, :count], wanted[row, -count:], rtol=1e-3, atol=1e-3)

    def test_positions_after_images_are_those_of_the_model(self) -> None:
        target, inputs = multimodal_target("qwen2_5_vl"), prompts_with_media("qwen2_5_vl", ROWS)
        decoder = Decoder(target, None)
        decoder.generate(**inputs, do_sample=False, max_new_tokens=1)
        offsets = decoder._state.cache.offsets
        # Images of 2 x 4 and 2 x 2 tokens take 4 and 2 positions. The last three axes are those of RoPE.
        assert offsets[-3:].squeeze(-1).tolist() == [[4 - 8, 0, 2 - 4]] * 3

    def test_a_prompt_may_end_with_an_image(self) -> None:
        target, inputs = multimodal_target("qwen2_5_vl"), prompts_with_media("qwen2_5_vl", ((5, (4, 8), 0),))
        cut = {"input_ids", "attention_mask", "mm_token_type_ids"}
        inputs = {name: value[:, :-1] if name in cut else value for name, value in inputs.items()}
        expected = target.model.generate(**inputs, **OPTIONS)
        drafter = ScriptedDrafter([expected[0]], VOCAB_SIZE)
        assert torch.equal(generate(target, drafter, **inputs, tree=TREE, **OPTIONS).sequences, expected)

    def test_a_video_may_take_more_positions_than_tokens(self) -> None:
        target, inputs = multimodal_target("qwen2_5_vl"), prompts_with_media("qwen2_5_vl", ((5, (4, 8), 6),))
        ids = inputs["input_ids"]
        inputs["pixel_values_videos"] = inputs.pop("pixel_values")
        inputs["video_grid_thw"] = torch.tensor([[2, 4, 4]])
        inputs["second_per_grid_ts"] = torch.tensor([9.0])
        del inputs["image_grid_thw"]
        inputs |= {"input_ids": ids.where(ids != IMAGE, VIDEO), "mm_token_type_ids": 2 * inputs["mm_token_type_ids"]}
        expected = target.model.generate(**inputs, **OPTIONS)
        assert not torch.equal(expected[:, -30:], expected_text("qwen2_5_vl", ((5, (4, 8), 6),))[:, -30:])
        drafter = ScriptedDrafter([expected[0]], VOCAB_SIZE)
        assert torch.equal(generate(target, drafter, **inputs, tree=TREE, **OPTIONS).sequences, expected)


class TestText:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_prompts_of_text_need_no_media(self, family: str) -> None:
        rows = ((6, None, 3), (2, None, 2))
        inputs = prompts_with_media(family, rows)
        output = generate(multimodal_target(family), scripted(family, rows), **inputs, tree=TREE, **OPTIONS)
        assert torch.equal(output.sequences, expected_text(family, rows))

    def test_a_text_goes_on_from_an_earlier_text_but_not_from_an_image(self) -> None:
        target = multimodal_target("qwen2_5_vl")
        decoder = Decoder(target, None)
        seen = decoder.generate(**prompts_with_media("qwen2_5_vl"), **OPTIONS).sequences
        one = generate(target, None, seen, **OPTIONS)
        assert torch.equal(decoder.generate(seen, reuse_cache=True, **OPTIONS).sequences, one.sequences)
        longer = torch.cat([one.sequences, seen[:, :4]], dim=1)
        again = decoder.generate(longer, reuse_cache=True, **OPTIONS)
        assert torch.equal(again.sequences, generate(target, None, longer, **OPTIONS).sequences)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"reuse_cache": True}, "reuse_cache compares token ids"),
            ({"batch_invariant": True}, "leave batch_invariant out"),
            ({"image_grid_thw": torch.ones(1, 3)}, "image_grid_thw"),
            ({"pixel_values": prompts_with_media("llava")["pixel_values"].repeat(2, 1, 1, 1)}, "do not match"),
        ],
        ids=lambda value: "".join(value),
    )
    def test_arguments(self, change: dict[str, Any], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            generate(multimodal_target("llava"), None, **prompts_with_media("llava") | change, **OPTIONS)

    def test_media_of_a_target_of_text(self) -> None:
        token_ids = torch.ones(1, 4).long()
        with pytest.raises(ValueError, match=r"token_type_ids: .* only token ids"):
            generate(tiny_target("gpt2"), None, token_ids, token_type_ids=token_ids, **OPTIONS)

    def test_padding_on_the_right(self) -> None:
        inputs = prompts_with_media("llava", ROWS)
        for name in ("input_ids", "attention_mask"):
            inputs[name] = inputs[name].flip(1)
        with pytest.raises(ValueError, match="pixel_values padding on the left"):
            generate(multimodal_target("llava"), None, **inputs, **OPTIONS)
        with pytest.raises(ValueError, match="padding on the left"):
            multimodal_target("llava").model.generate(**inputs, custom_generate=CustomGenerate(None), **OPTIONS)

    def test_pipelined_decoding(self) -> None:
        model = tiny_multimodal("llava")
        tie_layers(model, 2)
        decoder = PipelinedDecoder(model)
        text = prompts_with_media("llava", ((6, None, 3),))
        assert torch.equal(decoder.generate(**text, **OPTIONS).sequences, model.generate(**text, **OPTIONS))
        with pytest.raises(ValueError, match=r"pipelined decoding .* text only"):
            decoder.generate(**prompts_with_media("llava"), **OPTIONS)

    @pytest.mark.skipif(not HEARING, reason="this release of transformers has no Qwen2AudioModel")
    def test_sounds_that_the_model_would_expand(self) -> None:
        inputs = prompts_with_media("qwen2_audio", ((4, (4, 4), 4), (4, (4, 4), 4)))
        ids = inputs["input_ids"]
        is_first = (ids[0] != ids[0].roll(1)) | (ids[0] != IMAGE)
        inputs |= {"input_ids": ids[:, is_first], "attention_mask": inputs["attention_mask"][:, is_first]}
        inputs["attention_mask"][0, 0] = 0
        with pytest.raises(ValueError, match="where the prompt has"):
            generate(multimodal_target("qwen2_audio"), None, **inputs, **OPTIONS)

    @pytest.mark.parametrize(
        ("family", "reason"), [("mllama", r"layers \[1\] of Mllama"), ("llama4", "chunked_attention")]
    )
    def test_targets_by_name(self, family: str, reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            Target(tiny_multimodal(family))


class _Restless(LlavaForConditionalGeneration):
    """It moves every token after the prompt by three positions."""

    def prepare_inputs_for_generation(self, *args: Any, is_first_iteration: bool = False, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, is_first_iteration=is_first_iteration, **kwargs)
        if not is_first_iteration:
            inputs["position_ids"] = inputs["position_ids"] + 3
        return inputs


class TestProof:
    def test_models_that_go_on_in_their_own_way_are_refused(self) -> None:
        model = tiny_multimodal("llava")
        model.__class__ = _Restless
        with pytest.raises(ValueError, match=r"_Restless goes on .* pixel_values"):
            generate(model, None, **prompts_with_media("llava"), **OPTIONS)

    def test_it_runs_once_and_sees_an_end_of_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_multimodal("llava")
        first = int(expected_text("llava")[0, -30])
        model.generation_config.eos_token_id = first  # the text ends with its first token
        model.generation_config.stop_strings = None
        target = Target(model)
        inputs = prompts_with_media("llava", ROWS)
        expected = model.generate(**inputs, **OPTIONS)
        assert torch.equal(generate(target, None, **inputs, **OPTIONS).sequences, expected)
        assert target.capabilities.proven_media == {frozenset({"pixel_values"})}
        monkeypatch.setattr(
            "draftsmith.inference.targets.media_proof._continue_by_model",
            lambda *_: pytest.fail("it was proven before"),
        )
        assert torch.equal(generate(target, None, **inputs, **OPTIONS).sequences, expected)

    def test_texts_near_the_limit_of_positions(self) -> None:
        target = multimodal_target("llava")
        inputs = prompts_with_media("llava", ((200, (4, 4), 36),))
        assert inputs["input_ids"].shape[1] == 254
        target.capabilities.proven_media.clear()
        output = generate(target, None, **inputs, do_sample=False, max_new_tokens=2)
        assert torch.equal(output.sequences, target.model.generate(**inputs, do_sample=False, max_new_tokens=2))


def test_captured_steps_take_each_calls_positions() -> None:
    """Images of several sizes, and a text, by the same graphs."""
    target = multimodal_target("qwen2_5_vl")
    decoder = Decoder(target, drafter_of("eagle3", target), tree="dynamic:3,4,12")
    executor = capture(decoder)
    for size in ((4, 8), (8, 8), None, (4, 4)):
        inputs = prompts_with_media("qwen2_5_vl", ((5, size, 6),))
        expected = target.model.generate(**inputs, do_sample=False, max_new_tokens=12)
        assert torch.equal(decoder.generate(**inputs, do_sample=False, max_new_tokens=12).sequences, expected)
    assert executor.num_replays > 20


class TestTraining:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_targets_that_see_are_loaded_with_their_head(self, family: str) -> None:
        model = multimodal_target(family).model
        assert find_auto_class(model.config)._model_mapping[type(model.config)] is type(model)
        assert find_auto_class(tiny_target("llama").config) is transformers.AutoModelForCausalLM

    def test_features_of_texts(self) -> None:
        """Heads of a target that sees are trained on text."""
        target = multimodal_target("qwen2_5_vl")
        token_ids = prompts_with_media("qwen2_5_vl", ((9, None, 3),))["input_ids"]
        encoded = encode(target, token_ids, torch.ones_like(token_ids), feature_layers=(1, 3))
        with torch.no_grad():
            states = target.model(token_ids, output_hidden_states=True).hidden_states
        torch.testing.assert_close(encoded.features, torch.cat([states[1], states[3]], dim=-1))
