"""Finds the assistant's replies in a conversation that a chat template has rendered.

A reply begins after the header that the template gives the assistant (the generation prompt), and ends with its last
character; thoughts and tool calls are part of it. `{% generation %}` markers in a template tell where replies are.
Without markers, other renderings of the same conversation are compared with this one.
"""

import re
from dataclasses import dataclass
from typing import Any

from draftsmith.inference.request.chat_template import ChatRenderer, ConversationError
from draftsmith.training.data.layouts import Messages
from draftsmith.training.data.thoughts import split_visible

# No whitespace (templates trim), and no text that a conversation or a template could contain.
_SENTINEL, _EARLIER_SENTINEL = "@@sentinel-7f3a@@", "@@sentinel-91c4@@"
_CHANGED = (
    "the chat template renders a reply differently inside a conversation, so its tokens cannot be found; put "
    "{% generation %} markers around every reply in the template"
)


@dataclass(frozen=True)
class Span:
    """Characters begin to end - 1 of a text. is_complete: these are all that is learned; otherwise the end of the
    turn follows."""

    begin: int
    end: int
    is_complete: bool = True


def find_special_ids(tokenizer: Any) -> set[int]:
    """Ids of the tokens that are marked special or have a role: some tokenizers do not mark their end of turn."""
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)


class ReplyFinder:
    """Finds the replies of a conversation; `tools` are JSON schemas of functions to call.

    Args:
        template: of a processor; None = the tokenizer's.

    Raises:
        ConversationError: the template does not write the conversation.
    """

    def __init__(
        self, tokenizer: Any, messages: Messages, tools: list[Any] | None = None, *, template: Any = None
    ) -> None:
        self.renderer = ChatRenderer(tokenizer, messages, tools=tools, template=template)
        self.render = self.renderer.render
        special = sorted(map(tokenizer.convert_ids_to_tokens, find_special_ids(tokenizer)), key=len, reverse=True)
        self.turn_end = re.compile(r"\s*(?:" + "|".join(map(re.escape, special)) + ")") if special else None

    def find_marked(self, messages: Messages) -> tuple[str, list[Span]] | None:
        """Returns the text, and the spans between the template's `{% generation %}` markers; None without markers.

        Some templates put the end of the turn after the marker: it belongs to the reply all the same.
        """
        if not re.search(r"\{%-?\s*generation\b", self.renderer.template):
            return None
        text, spans = self.renderer.render_marked(messages)
        return text, [Span(begin, end, self._ends_turn(text[begin:end])) for begin, end in spans]

    def _ends_turn(self, text: str) -> bool:
        """Whether the text ends with a special token, followed at most by whitespace."""
        return self.turn_end is not None and any(not text[end.end() :].strip() for end in self.turn_end.finditer(text))

    def leave_out_turn_end(self, span: Span, text: str) -> Span:
        """The span of a reply that was cut off, whose end of turn is the template's only."""
        marks = self.turn_end.finditer(text, span.begin, span.end) if self.turn_end else ()
        ends = (mark.start() for mark in marks if not text[mark.end() : span.end].strip())
        return Span(span.begin, next(ends, span.end))

    def leave_out_unwritten(self, messages: Messages, text: str) -> Messages:
        """Returns the messages without those texts and thoughts beside tool calls that `text`, the rendered
        conversation, does not have: Llama 3 writes no text beside a call, and gpt-oss none before a later answer.
        """
        for index, message in enumerate(messages):
            for name in ("content", "reasoning_content"):
                if message.get("tool_calls") and message.get(name, "").strip():
                    rest = {key: value for key, value in messages[index].items() if key != name}
                    without = [*messages[:index], {"content": "", **rest}, *messages[index + 1 :]]
                    messages = without if self._renders(without, text) else messages
        return messages

    def _renders(self, messages: Messages, text: str) -> bool:
        try:
            return self.render(messages) == text
        except ConversationError:
            return False

    def find_reply(self, messages: Messages, index: int, text: str) -> Span:
        """Returns the span of the reply at `index` in `text`, the rendered conversation.

        Raises:
            ValueError: the reply cannot be found, or the template changed it.
        """
        before = self.render(messages[:index], is_prompt=True) if index else ""
        plain = self._find_unchanged(messages[index], text, before)
        return plain or self._find_by_comparison(messages, index, text, before)

    def _find_unchanged(self, message: dict[str, Any], text: str, before: str) -> Span | None:
        """Finds a reply that the template writes, with its end of turn, right after `before`; None if it does not."""
        reply, begin = message["content"].strip(), len(before)
        if not (message.keys() <= {"role", "content", "name"} and reply and text.startswith(before)):
            return None
        for written in (message["content"], reply):  # many templates trim
            end = begin + len(written)
            if text.startswith(written, begin) and self.turn_end and self.turn_end.match(text, end):
                return Span(begin, end, is_complete=False)
        return None

    def _find_by_comparison(self, messages: Messages, index: int, text: str, before: str) -> Span:
        """Finds the reply at `index` where the template changes its text or the text before it.

        Templates of thinking models write the thoughts of the last reply only, may write an empty thought, or open one
        in the prompt. So a shorter rendering need not be a prefix of this one. The text around the reply is found by
        rendering another text in its place.
        """
        written = self._replace(messages, index, _SENTINEL)
        try:
            around = self.render(written)
        except ConversationError:  # for example, tool results without their call
            return self._find_by_prefix(messages, index, text, before)
        if around.count(_SENTINEL) != 1:
            raise ValueError(
                f"the chat template writes a reply's text {around.count(_SENTINEL)} times; it must write it once"
            )
        left, _, right = around.partition(_SENTINEL)
        if messages[index].get("tool_calls") and not text.endswith(right):  # gpt-oss ends a call in a way of its own
            return self._find_by_prefix(messages, index, text, before)
        begin, end = len(before), len(text) - len(right)
        if not text.startswith(before):
            begin = len(left) - self._count_given_by_template(messages, index, written)
            if not text.startswith(left[:begin]):
                raise ValueError(_CHANGED)
        _, visible = split_visible(messages[index]["content"])
        if not text.endswith(right) or begin > end or visible.strip() not in text[begin:end]:
            raise ValueError(_CHANGED)
        return Span(begin, end, is_complete=False)

    def _find_by_prefix(self, messages: Messages, index: int, text: str, before: str) -> Span:
        """Finds the reply at `index` where it cannot be replaced: the text that it adds, its end of turn included."""
        upto = self.render(messages[: index + 1])
        if not (text.startswith(upto) and upto.startswith(before)):
            raise ValueError(_CHANGED)
        return Span(len(before), len(upto.rstrip()))

    def _count_given_by_template(self, messages: Messages, index: int, written: Messages) -> int:
        """Counts the characters (an empty thought) between the header of the assistant's turn and its content.

        The header is the common beginning of the turn in this rendering and in the prompt.
        """
        if index == 0:
            return 0
        here = self.render(self._replace(written, index - 1, _EARLIER_SENTINEL))
        prompt = self.render(self._replace(messages[:index], index - 1, _EARLIER_SENTINEL), is_prompt=True)
        if here.count(_EARLIER_SENTINEL) != 1 or prompt.count(_EARLIER_SENTINEL) != 1:
            raise ValueError(_CHANGED)
        between = here.partition(_EARLIER_SENTINEL)[2].partition(_SENTINEL)[0]
        header = prompt.partition(_EARLIER_SENTINEL)[2]
        is_same = [one == other for one, other in zip(between, header, strict=False)]
        return len(between) - (is_same.index(False) if False in is_same else len(is_same))

    @staticmethod
    def _replace(messages: Messages, index: int, text: str) -> Messages:
        """Replaces the message at `index` by another text (a tool result keeps the id of its call)."""
        kept = {key: value for key, value in messages[index].items() if key in ("role", "tool_call_id", "name")}
        message = {**kept, "content": text}
        return [*messages[:index], message, *messages[index + 1 :]]
