"""The text and the bytes that one token adds to a text."""

import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

# The alphabet of byte-level BPE: a character for each byte.
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


class TokenTexts:
    """Decodes single tokens as they stand inside a text.

    Many tokenizers strip the space with which a text begins (Llama 2, Mistral, Phi-3). So a token is decoded after
    another one. A token may also be a part of a character: its text is then U+FFFD, and its bytes join to the character
    with those of the other parts.

    Attributes:
        context: an ordinary token, after which any other keeps its space; [] if the vocabulary has none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = set(tokenizer.all_special_ids)
        words = (
            token_id
            for piece, token_id in tokenizer.get_vocab().items()
            if piece.isascii() and piece.isalnum() and token_id not in special
        )
        first = min(words, default=None)
        self.context = [] if first is None else [first]

    def context_after(self, prompt: Sequence[int]) -> list[int]:
        """The context in which the text after a prompt is decoded: none after a special token, where a text begins."""
        has_text = self._decode([*self.context, prompt[-1]], has_special=False) != self._decode(self.context)
        return self.context if has_text else []

    def read(self, token_id: int, *, is_first: bool = False) -> tuple[str, bytes]:
        """A token's text and bytes; `is_first`: as the first token of a text, without the space that is stripped."""
        context = [] if is_first else self.context
        text = self._decode([*context, token_id])[len(self._decode(context)) :]
        return text, _find_bytes(self.tokenizer.convert_ids_to_tokens(token_id) or "", text)

    def _decode(self, ids: Sequence[int], *, has_special: bool = True) -> str:
        options = {"skip_special_tokens": not has_special, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(ids, **options))


def _find_bytes(piece: str, text: str) -> bytes:
    """The bytes of a vocabulary's piece: the reading that decodes to its text. Pieces may be a byte's name (<0xF0>), or
    spelled in the alphabet of byte-level BPE; all others are text."""
    readings = []
    if name := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        readings.append(bytes.fromhex(name[1]))
    if all(character in _BYTE_OF for character in piece):
        readings.append(bytes(_BYTE_OF[character] for character in piece))
    return next((one for one in readings if one.decode(errors="replace") == text), text.encode())
