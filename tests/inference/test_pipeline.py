"""transformers' text-generation pipeline with a drafter: the same results."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer, pipeline

from draftsmith.inference import NgramDrafter
from draftsmith.inference.pipeline import DraftingPipeline

CHAT = [{"role": "user", "content": "Name three birds."}]
GREEDY = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(scope="module")
def stock(chat_target: PreTrainedModel, chat_tokenizer: PreTrainedTokenizerBase) -> Any:
    return pipeline("text-generation", model=chat_target, tokenizer=chat_tokenizer)


@pytest.fixture(scope="module")
def drafting(chat_target: PreTrainedModel, chat_tokenizer: PreTrainedTokenizerBase) -> DraftingPipeline:
    pipe: DraftingPipeline = pipeline(
        "text-generation",
        model=chat_target,
        tokenizer=chat_tokenizer,
        pipeline_class=DraftingPipeline,
        drafter=NgramDrafter(),
        tree="chain",
    )
    return pipe


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (CHAT, {}),
        ("Once upon a time", {"return_full_text": False}),
        ([CHAT, [{"role": "user", "content": "Hi"}]], {"batch_size": 2}),
        (CHAT, {"stop_sequence": "e"}),
    ],
    ids=["chat", "text", "batch", "stop sequence"],
)
def test_the_results_are_transformers(stock: Any, drafting: Any, inputs: Any, options: dict[str, Any]) -> None:
    assert drafting(inputs, **GREEDY, **options) == stock(inputs, **GREEDY, **options)


def test_sampling_takes_a_seed_and_a_streamer(
    drafting: Any, chat_tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "seed": 3}
    streamer = TextStreamer(chat_tokenizer, skip_prompt=True)
    first = drafting(CHAT, streamer=streamer, **options)
    assert drafting(CHAT, **options) == first
    assert first[0]["generated_text"][-1]["content"][:8] in capsys.readouterr().out
