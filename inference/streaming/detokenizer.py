"""Text from tokens that come one after the other."""

from __future__ import annotations

from typing import Any


class IncrementalDetokenizer:
    """Text of a growing token sequence, piece by piece; the pieces joined are the text decoded at once.

    A character whose bytes are spread over tokens appears with the last of them. Only the tokens since the last piece
    but one are decoded again: one piece of context, because what a token looks like may depend on the one before it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # the tokens before the pending ones begin here
        self._pending = 0  # the tokens without a piece begin here

    def add(self, token_id: int) -> str:
        """The text that becomes certain with this token; may be empty."""
        self._ids.append(token_id)
        return self._take(is_last=False)

    def flush(self) -> str:
        """What is left at the end: a character that was never completed."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> str:
        known = self._decode(self._ids[self._context : self._pending])
        text = self._decode(self._ids[self._context :])
        if text.endswith("\ufffd") and not is_last:  # bytes of a character that is not complete yet
            return ""
        if len(text) > len(known):
            self._context, self._pending = self._pending, len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
