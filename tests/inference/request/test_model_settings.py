"""What a call takes from the generation config of its model, and what it does not."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.inference import generate
from draftsmith.inference.request.model_settings import find_model_settings
from tests.tiny_targets import tiny_target

OWN: dict[str, Any] = {"repetition_penalty": 1.9, "min_p": 0.2, "top_k": 20, "no_repeat_ngram_size": 0, "top_p": 1.0}
NEUTRAL = {"repetition_penalty": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"repetition_penalty": 1.9}),
        ({"do_sample": True}, {"min_p": 0.2, "repetition_penalty": 1.9, "top_k": 20}),
        ({"do_sample": True, "top_k": 0, "min_p": None}, {"repetition_penalty": 1.9}),
        ({"do_sample": True, **NEUTRAL}, {}),
    ],
    ids=str,
)
def test_settings_that_are_not_given_come_from_the_model(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Neither ids nor lengths nor neutral ones, and those of sampling only where tokens are drawn."""
    config = GenerationConfig(**OWN, eos_token_id=3, max_length=50, use_cache=True)
    assert find_model_settings(config, given) == expected
    assert not find_model_settings(GenerationConfig(eos_token_id=3), given)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("way", ["arguments", "config"])
def test_a_neutral_argument_holds(do_sample: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: PreTrainedModel = tiny_target("llama")
    prompt = torch.tensor([[5, 6, 7]])

    def text(**options: Any) -> list[int]:
        given = {"do_sample": do_sample, "max_new_tokens": 16, **options}
        if way == "config":
            given = {"generation_config": GenerationConfig(**given)}
        return generate(model, None, prompt, seed=3, **given).sequences[0].tolist()

    plain = text(**NEUTRAL)
    monkeypatch.setattr(model, "generation_config", GenerationConfig(**OWN))
    assert text() != plain
    assert text(**NEUTRAL) == plain
