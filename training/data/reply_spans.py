"""Where a chat template puts what the assistant writes.

A reply begins where the header that the template gives the assistant (the generation prompt) ends, and ends with its
last character; thoughts and tool calls are part of it. `{% generation %}` markers in a template say so themselves.
Without them the conversation is rendered again with less in it, and the renderings are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from training.data.layouts import Messages
from training.data.thoughts import THOUGHT_MARKS, name_thoughts

# Neither whitespace (templates trim) nor anything a conversation or a template could contain.
_SENTINEL, _EARLIER_SENTINEL = "@@sentinel-7f3a@@", "@@sentinel-91c4@@"
_CHANGED = (
    "the chat template renders replies differently inside a conversation, so that the assistant's tokens cannot be "
    "told apart; add {% generation %} markers to the template"
)


@dataclass(frozen=True)
class Span:
    """Characters of a text: the first, and the one behind the last; whether the end of the turn is among them."""

    begin: int
    end: int
    has_turn_end: bool = True


def find_special_ids(tokenizer: Any) -> set[int]:
    """The ids of its special tokens: those marked so, and those that have a role (some mark their end of turn not)."""
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)


class ChatRenderer:
    """A tokenizer's chat template.

    Args:
        tokenizer: with a chat template.
        tools: JSON schemas of the functions the conversation may call, for templates that list them.
    """

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        self.template: str = tokenizer.get_chat_template(tools=tools)
        special = sorted(map(tokenizer.convert_ids_to_tokens, find_special_ids(tokenizer)), key=len, reverse=True)
        self.turn_end = re.compile(r"\s*(?:" + "|".join(map(re.escape, special)) + ")") if special else None

    def render(self, messages: Messages, *, is_prompt: bool = False) -> str:
        """The conversation as text; with `is_prompt`, followed by the header of the assistant's next turn.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        text: str = self.tokenizer.apply_chat_template(
            name_thoughts(messages, self.template),
            tools=self.tools,
            tokenize=False,
            add_generation_prompt=is_prompt,
        )
        return text

    def find_marked(self, messages: Messages) -> tuple[str, list[Span]] | None:
        """The text, and what stands between the template's `{% generation %}` markers; None if it has none. An end of
        turn right behind them, which some templates leave out, is the assistant's all the same."""
        if not re.search(r"\{%-?\s*generation\b", self.template):
            return None
        # As `apply_chat_template` does. Its own mask goes wrong for an empty reply, and past a character without token.
        rendered: Any = render_jinja_template(
            [name_thoughts(messages, self.template)],
            tools=self.tools,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        (text,), (spans,) = rendered
        return text, [Span(begin, end, self._ends_turn(text[begin:end])) for begin, end in spans]

    def _ends_turn(self, text: str) -> bool:
        """Whether a special token is the last of a text, but for whitespace."""
        return self.turn_end is not None and any(not text[end.end() :].strip() for end in self.turn_end.finditer(text))

    def find_replies(self, messages: Messages, text: str) -> Iterator[Span]:
        """Where each reply stands in `text`, the rendered conversation.

        Raises:
            ValueError: a reply is not in the text as it was written, or cannot be found.
        """
        for index, message in enumerate(messages):
            # What the assistant says before anyone else answers no prompt, and is not learned.
            is_opening = all(earlier["role"] == "assistant" for earlier in messages[:index])
            if message["role"] != "assistant" or is_opening:
                continue
            before = self.render(messages[:index], is_prompt=True)
            reply = message["content"].strip()
            begin = len(before)
            if message.keys() <= {"role", "content", "name"} and reply and text.startswith(before):
                for written in (message["content"], reply):  # many templates trim
                    end = begin + len(written)
                    if text.startswith(written, begin) and self.turn_end and self.turn_end.match(text, end):
                        yield Span(begin, end, has_turn_end=False)
                        break
                else:
                    yield self._find_by_comparison(messages, index, text, before)
            else:
                yield self._find_by_comparison(messages, index, text, before)

    def _find_by_comparison(self, messages: Messages, index: int, text: str, before: str) -> Span:
        """The reply at `index` where the template changes what it is given.

        Templates of models that think write thoughts of the last reply only, and may write an empty thought; some open
        one in the prompt. So neither the text up to a reply nor the reply has to be what it is in a shorter rendering.
        What stands around a reply is found by writing another text in its place.
        """
        written = self._replace(messages, index, _SENTINEL)
        try:
            around = self.render(written)
        except TemplateError:  # results without the call, for one
            return self._find_by_prefix(messages, index, text, before)
        if around.count(_SENTINEL) != 1:
            raise ValueError(
                f"the chat template writes a reply's text {around.count(_SENTINEL)} times; it must be once"
            )
        left, _, right = around.partition(_SENTINEL)
        begin, end = len(before), len(text) - len(right)
        if not text.startswith(before):
            begin = len(left) - self._count_given_by_template(messages, index, written)
            if not text.startswith(left[:begin]):
                raise ValueError(_CHANGED)
        content = messages[index]["content"]
        visible = next((content.rpartition(close)[2] for _, close in THOUGHT_MARKS if close in content), content)
        if not text.endswith(right) or begin > end or visible.strip() not in text[begin:end]:
            raise ValueError(_CHANGED)
        return Span(begin, end, has_turn_end=False)

    def _find_by_prefix(self, messages: Messages, index: int, text: str, before: str) -> Span:
        """The reply at `index` where it cannot be replaced: what a rendering gains by it, its end of turn included."""
        upto = self.render(messages[: index + 1])
        if not (text.startswith(upto) and upto.startswith(before)):
            raise ValueError(_CHANGED)
        return Span(len(before), len(upto.rstrip()))

    def _count_given_by_template(self, messages: Messages, index: int, written: Messages) -> int:
        """How many characters of the assistant's turn (an empty thought) stand before its content; the header is what
        the turn begins with here and in the prompt."""
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
        """The message at `index` with another text and nothing else (a result keeps the call it answers)."""
        kept = {key: value for key, value in messages[index].items() if key in ("role", "tool_call_id", "name")}
        message = {**kept, "content": text}
        return [*messages[:index], message, *messages[index + 1 :]]
