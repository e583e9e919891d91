"""Pipelined decoding of models with tied layers gives the text of plain decoding, whatever is dropped on the way."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.inference import PipelinedDecoder, Target, generate
from draftsmith.inference.pipelined.texts_in_flight import Segment, TextInFlight
from draftsmith.inference.targets.layer_groups import LayerGroups, tie_layers
from tests.inference.test_generation import Recorder
from tests.tiny_targets import pad_prompts, random_prompt, tiny_target

LENGTHS = (5, 23, 1)


def tied_target(family: str = "llama", group_size: int = 2, **settings: Any) -> PreTrainedModel:
    model = tiny_target(family, **settings)
    tie_layers(model, group_size)
    return model


# Gemma 3 alternates windows in groups of three layers. Small weights make the first group right more often.
@pytest.mark.parametrize(
    ("family", "group_size", "settings", "do_sample"),
    [
        ("llama", 2, {}, False),
        ("llama", 1, {"initializer_range": 0.1}, True),
        ("gemma3", 3, {}, True),
        ("mixtral", 2, {}, False),
    ],
)
def test_the_text_is_the_targets_own(family: str, group_size: int, settings: dict[str, Any], do_sample: bool) -> None:
    model = tied_target(family, group_size, **settings)
    decoder = PipelinedDecoder(model)
    prompts = pad_prompts([random_prompt(length, length) for length in LENGTHS])
    options = {"max_new_tokens": 24, "do_sample": do_sample, "seed": 1, **({"top_p": 0.9} if do_sample else {})}
    expected = generate(model, None, **prompts, **options).sequences
    found = decoder.generate(**prompts, **options)
    assert found.sequences.tolist() == expected.tolist()
    stats = found.stats
    assert stats.num_confirmed + stats.num_refuted == stats.num_new_tokens
    assert stats.num_dropped >= stats.num_refuted - len(LENGTHS)


def test_one_pass_a_token_where_every_prediction_is_right() -> None:
    """Layers that change nothing make the first group right; then all groups are busy and no pass is lost."""
    model = tied_target("llama", 2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    found = PipelinedDecoder(model).generate(random_prompt(4), max_new_tokens=20, do_sample=False)
    assert found.stats.num_refuted == 0
    assert found.stats.passes_per_token == 1


def test_end_of_text_and_limits() -> None:
    model = tied_target()
    prompts = pad_prompts([random_prompt(length, length) for length in LENGTHS])
    plain = generate(model, None, **prompts, max_new_tokens=30, do_sample=False).sequences
    end = int(plain[1, prompts["input_ids"].shape[1] + 7])
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    expected = generate(model, None, **prompts, **options).sequences
    assert PipelinedDecoder(model).generate(**prompts, **options).sequences.tolist() == expected.tolist()
    one = PipelinedDecoder(model).generate(**prompts, max_new_tokens=1, do_sample=False).sequences
    assert one.tolist() == plain[:, : one.shape[1]].tolist()


def test_streamers() -> None:
    streamer = Recorder()
    output = PipelinedDecoder(tied_target()).generate(
        random_prompt(6), max_new_tokens=8, do_sample=False, streamer=streamer
    )
    assert streamer.ended == 1
    assert streamer.tokens == output.sequences[0].tolist()


def test_the_example_of_the_docstring() -> None:
    text = TextInFlight([5, 6], num_groups=3, segment_size=2)
    assert text.groups == [Segment(0, (5, 6)), None, None]
    assert not text.may_emit
    assert text.move(7, 0) is False
    assert text.move(9, 0) is False
    assert text.groups == [Segment(3, (9,)), Segment(2, (7,)), Segment(0, (5, 6))]
    assert text.may_emit
    assert text.move(1, 7) is False
    assert text.move(2, 8) is True
    assert text.groups == [Segment(3, (8,)), None, None]
    assert (text.known, text.num_confirmed, text.num_dropped) == (4, 1, 2)


def test_a_saved_model_is_still_tied(tmp_path: Any) -> None:
    model = tied_target()
    model.save_pretrained(tmp_path, state_dict={name: value.clone() for name, value in model.state_dict().items()})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert LayerGroups(Target.of(loaded)).num_groups == 3


def test_refusals() -> None:
    with pytest.raises(ValueError, match="this LlamaForCausalLM do not repeat"):
        PipelinedDecoder(tiny_target("llama"))
    with pytest.raises(ValueError, match=r"group 2 .* GPT2LMHeadModel .* other states"):
        PipelinedDecoder(tied_target("gpt2"))
    with pytest.raises(ValueError, match=r"group_size is 4, .* 6 layers"):
        tied_target(group_size=4)
    with pytest.raises(ValueError, match="layers 0 and 2 differ"):
        tied_target("deepseek_v3")
    decoder = PipelinedDecoder(tied_target())
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor reads the text"):
        decoder.generate(random_prompt(4), max_new_tokens=4, repetition_penalty=1.2)
    with pytest.raises(ValueError, match="pipelined decoding gives tokens, not scores"):
        decoder.generate(random_prompt(4), max_new_tokens=4, output_scores=True, return_dict_in_generate=True)
