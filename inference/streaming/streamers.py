"""transformers' streamers, which get the tokens of a text while it is decoded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ending(streamer: Any) -> Iterator[None]:
    """Ends the streamer, also when the call is refused or a step fails: its reader would wait for ever.

    Raises:
        TypeError: it is no streamer, and not None.
    """
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(
            f"streamer is {streamer!r}; an object with put() and end() is expected, such as transformers' "
            "TextStreamer(tokenizer)"
        )
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()
