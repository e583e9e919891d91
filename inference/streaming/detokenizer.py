"""Text from tokens that arrive one at a time."""

from collections.abc import Sequence
from typing import Any


class IncrementalDetokenizer:
    """The text of a growing token sequence in pieces, which together are the text decoded at once.

    A character whose bytes are spread over several tokens appears with the last of these tokens. Each call decodes the
    last piece's tokens again as context, because a token's text may depend on the token before it.

    Args:
        context: tokens before the first one. Without them some tokenizers strip the space with which the text begins.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.context = [*context]
        self._ids = [*context]
        self._known = 0  # the tokens before the pending ones begin here
        self._pending = len(self._ids)  # the tokens without a piece begin here

    def add(self, token_id: int) -> str:
        """Returns the text that this token completes; it may be empty."""
        self._ids.append(token_id)
        return self._take(is_last=False)

    def flush(self) -> str:
        """Returns the text that is left at the end: an incomplete character."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> str:
        known = self._decode(self._ids[self._known : self._pending])
        text = self._decode(self._ids[self._known :])
        if text.endswith("\ufffd") and not is_last:  # an incomplete character
            return ""
        if len(text) > len(known):
            self._known, self._pending = self._pending, len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
