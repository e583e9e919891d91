"""Thoughts: how models mark them in text."""

from collections.abc import Iterator

# How models mark their thoughts: Qwen, DeepSeek, GLM, ...; Mistral; gpt-oss; Kimi; Seed.
THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
)


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


def split_visible(content: str) -> tuple[str, str]:
    """Returns (thoughts, visible text) of a reply's content; no thoughts where no mark closes them.

    Worked example: ("a", "b") for "<think>a</think>b".
    """
    for opening, closing in THOUGHT_MARKS:
        if closing in content:
            thoughts, _, visible = content.rpartition(closing)
            return thoughts.replace(opening, ""), visible
    return "", content


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
