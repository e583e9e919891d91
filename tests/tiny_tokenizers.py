"""Small tokenizers of several kinds, without training or files."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StopStringCriteria

WORDS = ("Hello", "world", "sea", "and")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: words with and without their space, letters, and a token for each byte. A text's first space is
    stripped. Its chat template ends in plain text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [*(f"▁{word}" for word in WORDS), *WORDS]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def read_whole_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop strings for tokenizers of whole words: transformers finds the text of a token beside a word of its own."""

    def read(tokenizer: Any, **_: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
        vocabulary = tokenizer.get_vocab()
        return tuple(vocabulary), tuple(vocabulary.values())

    monkeypatch.setattr(StopStringCriteria, "clean_tokenizer_vocab", staticmethod(read))
