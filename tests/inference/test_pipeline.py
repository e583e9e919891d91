"""transformers' text-generation pipeline with a drafter: the same results."""

from typing import Any

import pytest
import torch
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
    return pipeline(
        "text-generation",
        model=chat_target,
        tokenizer=chat_tokenizer,
        pipeline_class=DraftingPipeline,
        drafter=NgramDrafter(),
        tree="chain",
    )


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


def test_stop_strings_find_the_pipelines_tokenizer(stock: Any, drafting: Any, chat_tokenizer: Any) -> None:
    found = drafting(CHAT, stop_strings=["e"], **GREEDY)
    assert found == stock(CHAT, stop_strings=["e"], tokenizer=chat_tokenizer, **GREEDY)


def test_several_sequences_of_one_prompt(drafting: Any) -> None:
    texts = drafting(CHAT, num_return_sequences=3, max_new_tokens=12, do_sample=True, temperature=1.5, seed=1)
    assert len({text["generated_text"][-1]["content"] for text in texts}) == 3


def test_an_empty_prompt_begins_with_bos(drafting: Any, chat_target: PreTrainedModel, chat_tokenizer: Any) -> None:
    bos = torch.tensor([[chat_target.generation_config.bos_token_id]])
    expected = chat_target.generate(bos, attention_mask=torch.ones_like(bos), **GREEDY)
    text = chat_tokenizer.decode(expected[0], skip_special_tokens=True)
    assert drafting("", **GREEDY)[0]["generated_text"] == text


def test_drafts_are_used_and_counted(drafting: DraftingPipeline) -> None:
    before = drafting.stats.num_new_tokens
    drafting(CHAT, **GREEDY)
    assert drafting.stats.num_new_tokens > before
    assert drafting.stats.num_verify_steps > 0
    assert drafting.model is drafting.decoder.target.model


def test_sampling_takes_a_seed_and_a_streamer(
    drafting: Any, chat_tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "seed": 3}
    streamer = TextStreamer(chat_tokenizer, skip_prompt=True)
    first = drafting(CHAT, streamer=streamer, **options)
    assert drafting(CHAT, **options) == first
    assert first[0]["generated_text"][-1]["content"][:8] in capsys.readouterr().out


def test_scores_are_returned_as_by_the_stock_pipeline(stock: Any, drafting: Any) -> None:
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    for found, wanted in zip(drafting(["The", "Once"], **options), stock(["The", "Once"], **options), strict=True):
        assert found[0].keys() == wanted[0].keys()
        assert found[0]["generated_text"] == wanted[0]["generated_text"]
        torch.testing.assert_close(*(torch.tensor(one[0]["scores"]) for one in (found, wanted)), atol=1e-4, rtol=0)
