"""Decides which replies of a conversation are learned: those with text that the chat template writes.

An empty reply would teach that the end of a turn follows the header. It stays in the conversation as context, as does a
turn that the data mark as not to be learned.
"""

from dataclasses import dataclass
from typing import Any

from draftsmith.training.data.layouts import Messages
from draftsmith.training.data.reply_spans import ReplyFinder, Span
from draftsmith.training.data.thoughts import find_thought_end, split_visible

EMPTY = "empty replies, which are context only"
UNLEARNED = "replies that the data mark as not to be learned"
UNWRITTEN = "texts beside tool calls, which the chat template does not write"
# Keys of a message that are about learning it; the chat template does not see them.
_MARKS = ("learn", "truncated")
LEFT_OUT = "conversations without their system text, which the chat template writes in prompts only"


@dataclass(frozen=True)
class LearnedTurns:
    """A rendered conversation.

    Attributes:
        text: all of it.
        spans: the replies to learn.
        notes: EMPTY or UNLEARNED for each reply that is context only; LEFT_OUT; UNWRITTEN for each such text.
    """

    text: str
    spans: list[Span]
    notes: list[str]


def find_learned_turns(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: list[dict[str, Any]] | None = None,
    template: str | None = None,
) -> LearnedTurns:
    """Renders a conversation and finds the replies to learn.

    The template's `{% generation %}` markers decide where there are any; replies that are context only are left out.

    Args:
        template: of a processor; None = the tokenizer's.

    Raises:
        ConversationError: the template does not write the conversation.
        ValueError: a reply cannot be found in the rendered text.
    """
    plain = [{key: value for key, value in message.items() if key not in _MARKS} for message in messages]
    finder = ReplyFinder(tokenizer, plain, tools, template=template)
    marked = finder.find_marked(plain)
    text, spans = marked or (finder.render(plain), [])
    written = finder.leave_out_unwritten(plain, text)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if marked is not None and len(spans) == len(places):
        found = dict(zip(places, spans, strict=True))
    else:
        if marked is None:  # an opening by the assistant answers no prompt, so it is not learned
            places = [place for place in places if any(earlier["role"] != "assistant" for earlier in messages[:place])]
        else:
            places = [place for place in places if not (_says_something(plain[place]) and _is_wanted(messages[place]))]
        found = {place: finder.find_reply(written, place, text) for place in places}
    notes = {place: _find_note(messages[place], text, span) for place, span in found.items()}
    context = [found[place] for place, note in notes.items() if note]
    if marked is None:
        spans = [found[place] for place, note in notes.items() if not note]
    else:
        spans = [span for span in spans if not any(span.begin <= one.end and one.begin <= span.end for one in context)]
    if messages[-1].get("truncated") and spans and not notes.get(len(messages) - 1):
        spans = [*spans[:-1], finder.leave_out_turn_end(spans[-1], text)]
    left_out = [LEFT_OUT] if finder.renderer.left_out else []
    left_out += [UNWRITTEN for one, other in zip(plain, written, strict=True) if one["content"] != other["content"]]
    return LearnedTurns(text, spans, [*filter(None, notes.values()), *left_out])


def _is_wanted(message: dict[str, Any]) -> bool:
    return bool(message.get("learn", True))


def _says_something(message: dict[str, Any]) -> bool:
    """Whether a reply has a tool call, or text besides its thoughts."""
    return bool(message.get("tool_calls")) or bool(split_visible(message["content"])[1].strip())


def _find_note(message: dict[str, Any], text: str, span: Span) -> str:
    """Why a reply is context only, or "".

    Args:
        text, span: the rendered conversation, and the reply in it.
    """
    if not _is_wanted(message):
        return UNLEARNED
    written, content = text[span.begin : span.end], message["content"].strip()
    # A text that ends with a closing mark is no thought unless a thought begins it.
    is_plain = bool(content) and content in written and find_thought_end(text, span.begin, span.end) is None
    if is_plain or _says_something(message):
        return ""
    thoughts = (message.get("reasoning_content") or split_visible(message["content"])[0]).strip()
    return "" if thoughts and thoughts in written else EMPTY
