"""Thoughts: how models mark them in their texts, and what chat templates make of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from training.data.layouts import Messages

# How models mark their thoughts: Qwen, DeepSeek, GLM, ...; Mistral; gpt-oss; Kimi; Seed.
THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
)
# What a template may call the thoughts of a message: nearly all the first, gpt-oss's the second.
_KEYS = ("reasoning_content", "thinking", "reasoning")


def find_thought_end(text: str, begin: int, end: int) -> int | None:
    """The character behind the thought that the reply text[begin:end] begins with; None if it begins with none, and the
    end of the text if it does not end, so that nothing of the turn is left.

    Worked example: of "<think>a</think>b" from 0 to 17 it is 16; the same from 7, where the header opened the thought.
    """
    for opening, closing in THOUGHT_MARKS:
        first = begin + len(text[begin:end]) - len(text[begin:end].lstrip())
        is_open = text.startswith(opening, first) or text[:begin].rstrip().endswith(opening)
        if is_open:
            place = text.find(closing, begin, end)
            return len(text) if place < 0 else place + len(closing)
    return None


def split_thoughts(text: str, header: str = "") -> Iterator[tuple[str, str]]:
    """(thoughts, what follows them) of a reply's text, in as many ways as it can be read: with marks of several kinds,
    and with the line breaks around them, which templates write themselves, or without.

    Args:
        header: what stands before the text; it may have opened the thought.
    """
    for opening, closing in THOUGHT_MARKS:
        is_open = header.rstrip().endswith(opening)
        if closing in text and (is_open or text.startswith(opening)):
            thoughts, _, rest = text.removeprefix(opening).partition(closing)
            yield thoughts, rest
            yield thoughts.strip("\n"), rest.lstrip("\n")


def name_thoughts(messages: Messages, template: str) -> Messages:
    """Messages whose `reasoning_content` has the name that the chat template reads."""
    key = next((name for name in _KEYS if re.search(rf"\w\.{name}\b|['\"]{name}['\"]", template)), _KEYS[0])
    if key == _KEYS[0] or not any(_KEYS[0] in message for message in messages):
        return messages
    return [{key if name == _KEYS[0] else name: value for name, value in message.items()} for message in messages]


def count_lost_thoughts(messages: Messages, text: str) -> int:
    """How many replies of a conversation have thoughts that are not in `text`, its rendering: none as long as those of
    the last reply are, since templates that keep thoughts may still drop those of earlier turns."""
    found = [find_thoughts(message) for message in messages]
    words = " ".join(text.split())  # templates add and take line breaks
    lost = [bool(thoughts) and thoughts not in words for thoughts in found]
    return sum(lost) if lost[-1] else 0


def find_thoughts(message: dict[str, Any]) -> str:
    """The thoughts of a message, its words alone; "" if it has none."""
    if message["role"] != "assistant":
        return ""
    thoughts, content = message.get("reasoning_content"), message["content"]
    if thoughts is None:
        closing = next((closing for _, closing in THOUGHT_MARKS if closing in content), None)
        thoughts = "" if closing is None else content.partition(closing)[0]
        for opening, _ in THOUGHT_MARKS:
            thoughts = thoughts.rpartition(opening)[2]
    return " ".join(thoughts.split())
