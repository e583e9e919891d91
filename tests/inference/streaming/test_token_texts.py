"""Texts and bytes of single tokens, by kind of tokenizer."""

from typing import Any

import pytest

from draftsmith.inference.streaming.detokenizer import IncrementalDetokenizer
from draftsmith.inference.streaming.token_texts import TokenTexts
from tests.tiny_tokenizers import sentencepiece_tokenizer

ODD_TEXT = "Grüße, 日本語 🙂👩‍👩‍👧 naïve\n\n  two spaces, ½ and \u0000, \ufffd, Ġ, ▁, <0x41>"
EMOJI = ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]


@pytest.fixture
def llama() -> Any:
    return sentencepiece_tokenizer()


def read(tokenizer: Any, *pieces: str, **options: Any) -> list[tuple[str, bytes]]:
    texts = TokenTexts(tokenizer)
    return [texts.read(token_id, **options) for token_id in tokenizer.convert_tokens_to_ids(list(pieces))]


def test_bytes_of_byte_level_tokens_join_to_the_text(chat_tokenizer: Any) -> None:
    token_ids = chat_tokenizer(ODD_TEXT, add_special_tokens=False)["input_ids"]
    found = [TokenTexts(chat_tokenizer).read(token_id) for token_id in token_ids]
    assert b"".join(own for _, own in found) == ODD_TEXT.encode()
    parts = [own for text, own in found if "\ufffd" in text]
    assert len(parts) > 4, "some characters must be spread over tokens for this test to mean anything"
    assert all(text.encode() == own for text, own in found if "\ufffd" not in text)


def test_sentencepiece_tokens_keep_their_space(llama: Any) -> None:
    assert read(llama, "▁Hello", "world", "▁sea", "▁") == [
        (" Hello", b" Hello"), ("world", b"world"), (" sea", b" sea"), (" ", b" "),
    ]  # fmt: skip
    assert read(llama, "▁Hello", "Hello", is_first=True) == [("Hello", b"Hello")] * 2


def test_a_text_that_goes_on_keeps_its_first_space(llama: Any) -> None:
    token_ids = llama.convert_tokens_to_ids(["▁Hello", *EMOJI, "▁world"])
    for context, expected in (([], "Hello🙂 world"), (TokenTexts(llama).context, " Hello🙂 world")):
        detokenizer = IncrementalDetokenizer(llama, context)
        assert "".join(map(detokenizer.add, token_ids)) + detokenizer.flush() == expected
