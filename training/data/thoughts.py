"""Thoughts: how models mark them in text, and how chat templates name or drop them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from training.data.layouts import Messages

# How models mark their thoughts: Qwen, DeepSeek, GLM, ...; Mistral; gpt-oss; Kimi; Seed.
THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
)
# A template's key for the thoughts of a message: the first one in nearly all, the second in gpt-oss.
_KEYS = ("reasoning_content", "thinking", "reasoning")


def find_thought_end(text: str, begin: int, end: int) -> int | None:
    """Returns where the thought at the beginning of the reply text[begin:end] ends; None if it begins with no thought.

    For a thought without an end it is the end of the text: nothing of the turn is left to learn.

    Worked example: 16 for "<think>a</think>b" from 0 to 17; also from 7, where the header opened the thought.
    """
    for opening, closing in THOUGHT_MARKS:
        first = begin + len(text[begin:end]) - len(text[begin:end].lstrip())
        is_open = text.startswith(opening, first) or text[:begin].rstrip().endswith(opening)
        if is_open:
            place = text.find(closing, begin, end)
            return len(text) if place < 0 else place + len(closing)
    return None


def split_thoughts(text: str, header: str = "") -> Iterator[tuple[str, str]]:
    """Yields (thoughts, rest) for each way to read a reply's text: by kind of mark, with and without line breaks.

    Templates write the line breaks around marks themselves.

    Args:
        header: the text before the reply; it may have opened the thought.
    """
    for opening, closing in THOUGHT_MARKS:
        is_open = header.rstrip().endswith(opening)
        if closing in text and (is_open or text.startswith(opening)):
            thoughts, _, rest = text.removeprefix(opening).partition(closing)
            yield thoughts, rest
            yield thoughts.strip("\n"), rest.lstrip("\n")


def name_thoughts(messages: Messages, template: str) -> Messages:
    """Renames the messages' `reasoning_content` to the key that the chat template reads."""
    key = next((name for name in _KEYS if re.search(rf"\w\.{name}\b|['\"]{name}['\"]", template)), _KEYS[0])
    if key == _KEYS[0] or not any(_KEYS[0] in message for message in messages):
        return messages
    return [{key if name == _KEYS[0] else name: value for name, value in message.items()} for message in messages]
