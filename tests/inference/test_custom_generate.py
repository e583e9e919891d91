"""A drafter inside transformers' own generate: what it returns, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from draftsmith.inference import CustomGenerate, NgramDrafter
from draftsmith.inference.targets.forward_names import find_cache_name, read_cache
from tests.inference.test_generation import GREEDY, MODEL, PROMPT, Recorder, StopAt, scripted, truth
from tests.inference.tiny_encoder_decoders import tiny_encoder_decoder


def drafted(**options: Any) -> Any:
    method = options.pop("method", None) or CustomGenerate(NgramDrafter(), tree="chain")
    return MODEL.generate(PROMPT, custom_generate=method, **{**GREEDY, **options})


def test_the_text_is_the_models_own_in_fewer_passes() -> None:
    method = CustomGenerate(scripted())
    assert torch.equal(drafted(method=method), truth())
    assert method.stats.acceptance_length > 2
    before = method.stats.num_new_tokens
    drafted(method=method)
    assert method.stats.num_new_tokens == 2 * before


def test_weights_are_packed_once() -> None:
    method = CustomGenerate(scripted(), pack_weights=True)
    assert torch.equal(drafted(method=method), truth())
    decoder = method._decoder
    assert torch.equal(drafted(method=method), truth())
    assert method._decoder is decoder


def test_processors_and_criteria_are_those_of_the_call() -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 4}
    assert torch.equal(drafted(**options), truth(**options))
    forbidden = int(truth()[0, PROMPT.shape[1]])

    def forbid(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, forbidden] = float("-inf")
        return scores

    options = {
        "logits_processor": LogitsProcessorList([forbid]),
        "stopping_criteria": StoppingCriteriaList([StopAt(14)]),
    }
    found = drafted(**options)
    assert torch.equal(found, truth(**{**options, "stopping_criteria": StoppingCriteriaList([StopAt(14)])}))
    assert found.shape[1] == 14


def test_a_dictionary_is_returned_when_it_is_asked_for() -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    found, expected = drafted(**options), truth(**options)
    assert type(found) is type(expected)
    assert torch.equal(found.sequences, expected.sequences)
    for mine, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), rtol=1e-4, atol=1e-4)


def test_a_streamer_belongs_to_the_method() -> None:
    streamer = Recorder()
    found = drafted(method=CustomGenerate(scripted(), streamer=streamer))
    assert streamer.tokens == found[0].tolist()
    assert streamer.ended == 1
    with pytest.raises(ValueError, match=r"a streamer .* got 2 rows"):
        drafted(method=CustomGenerate(scripted(), streamer=streamer), num_return_sequences=2, do_sample=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2 is not supported"),
        ({"use_cache": False}, "use_cache=False is not supported"),
        ({"generation_config": GenerationConfig(penalty_alpha=0.6)}, "penalty_alpha=0.6 is not supported"),
        ({"token_type_ids": torch.zeros_like(PROMPT)}, "token_type_ids"),
        ({"position_ids": torch.arange(6)[None] + 3}, "position_ids is not supported"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_the_loop_cannot_honour_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafted(**options)


def test_a_cache_with_tokens_is_refused() -> None:
    cache = read_cache(MODEL(PROMPT[:, :3], use_cache=True))
    with pytest.raises(ValueError, match="holds tokens already"):
        drafted(**{find_cache_name(MODEL): cache})


def test_encoder_decoder_models_are_refused() -> None:
    model = tiny_encoder_decoder("t5")
    with pytest.raises(ValueError, match=r"does not give the sources.*call draftsmith\.generate"):
        model.generate(PROMPT % 96, custom_generate=CustomGenerate(None), **GREEDY)
