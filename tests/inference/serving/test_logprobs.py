"""Log-probabilities in replies: texts and bytes of tokens that are not whole words or characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from draftsmith.inference import Target
from draftsmith.inference.serving.scheduler import Limits
from tests.inference.serving.conftest import MODEL, Running, running
from tests.inference.serving.test_replies import MESSAGES, tokenizer_of
from tests.tiny_targets import tiny_target
from tests.tiny_tokenizers import sentencepiece_tokenizer

NAMES = ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]  # of an emoji's bytes


@pytest.fixture(scope="module")
def sentencepiece() -> Iterator[Running]:
    tokenizer = sentencepiece_tokenizer()
    target = Target(tiny_target("llama", vocab_size=len(tokenizer)))
    with running(target, tokenizer, limits=Limits(max_rows=2, max_length=64)) as one:
        yield one


def forced(served: Running, pieces: Sequence[str]) -> dict[str, Any]:
    """Options of a reply that consists of these tokens, in an order that the target chooses."""
    ids = tokenizer_of(served).convert_tokens_to_ids(list(pieces))
    bias = {str(token_id): 100 for token_id in ids}
    return {"model": MODEL, "max_tokens": 8, "temperature": 0, "logit_bias": bias}


@pytest.mark.parametrize("is_stream", [False, True])
def test_tokens_and_bytes_of_a_chat_join_to_its_text(sentencepiece: Running, is_stream: bool) -> None:
    options = forced(sentencepiece, ["▁Hello", "▁world", "and"])
    with sentencepiece.client() as client:
        reply = client.chat.completions.create(
            messages=MESSAGES, logprobs=True, top_logprobs=20, stream=is_stream, **options
        )
        choices = [chunk.choices[0] for chunk in reply] if is_stream else reply.choices
    messages = [choice.delta if is_stream else choice.message for choice in choices]
    text = "".join(message.content or "" for message in messages)
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert " " in text
    assert "".join(entry.token for entry in entries) == text
    assert b"".join(bytes(entry.bytes) for entry in entries) == text.encode()
    assert [len(entry.top_logprobs) for entry in entries] == [20] * 8


def test_a_completion_goes_on_with_its_prompt(sentencepiece: Running) -> None:
    options = forced(sentencepiece, ["▁world"])
    with sentencepiece.client() as client:
        choice = client.completions.create(prompt="Hello", logprobs=1, **options).choices[0]
    assert choice.text == " world" * 8
    assert choice.logprobs.tokens == [" world"] * 8
    assert choice.logprobs.text_offset == [6 * place for place in range(8)]


def test_a_completion_after_a_special_token_begins_a_text(sentencepiece: Running) -> None:
    options = forced(sentencepiece, ["▁world"])
    prompt = tokenizer_of(sentencepiece).convert_tokens_to_ids(["▁Hello", "</s>"])
    with sentencepiece.client() as client:
        choice = client.completions.create(prompt=prompt, logprobs=1, **options).choices[0]
    assert choice.text == "".join(choice.logprobs.tokens) == ("world " * 8).strip()
    assert choice.logprobs.text_offset == [0, *(5 + 6 * place for place in range(7))]


@pytest.mark.parametrize("kind", ["sentencepiece", "served"])
def test_bytes_of_an_emojis_parts_are_its_own(kind: str, request: pytest.FixtureRequest) -> None:
    one: Running = request.getfixturevalue(kind)
    pieces = NAMES if kind == "sentencepiece" else tokenizer_of(one).tokenize("🙂")
    found = []
    with one.client() as client:
        for piece in pieces:
            reply = client.chat.completions.create(messages=MESSAGES, logprobs=True, **forced(one, [piece]))
            (own,) = {bytes(entry.bytes) for entry in reply.choices[0].logprobs.content}
            found.append(own)
    assert len(found) == 4
    assert b"".join(found) == "🙂".encode()


def test_likely_tokens_with_the_same_text_are_all_kept(sentencepiece: Running) -> None:
    """Parts of characters, in both formats."""
    options = forced(sentencepiece, NAMES)
    with sentencepiece.client() as client:
        completion = client.completions.create(prompt="Hello", logprobs=20, **options).choices[0]
        chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=20, **options).choices[0]
    likely = [[entry.token for entry in one.top_logprobs] for one in chat.logprobs.content]
    assert len(likely) == 8
    for texts in likely:
        assert len(texts) == 20
        assert texts.count("\ufffd") > 1
    for scores in completion.logprobs.top_logprobs:
        assert len(scores) == 20
        assert "\ufffd" in scores
        assert any(key.startswith("token_id:") for key in scores)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
