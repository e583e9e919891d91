"""A drafter inside transformers' own generate: what it returns, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from draftsmith.inference import CustomGenerate, NgramDrafter
from tests.inference.test_generation import GREEDY, MODEL, PROMPT, StopAt, scripted, truth


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2 is not supported"),
        ({"generation_config": GenerationConfig(penalty_alpha=0.6)}, "penalty_alpha=0.6 is not supported"),
        ({"position_ids": torch.arange(6)[None] + 3}, "position_ids is not supported"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_the_loop_cannot_honour_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafted(**options)
