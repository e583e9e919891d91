"""Finds by rendering how a chat template begins the next turn, and which token ends a turn."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from draftsmith.inference.request.chat_template import ChatRenderer, ConversationError, Tools
from draftsmith.training.data.layouts import Messages
from draftsmith.training.data.reply_spans import find_special_ids
from draftsmith.training.data.thoughts import THOUGHT_MARKS, split_thoughts
from draftsmith.training.synthesis.reply_decoding import drop_marks

Role = Literal["user", "assistant"]

# No whitespace (templates trim), and no text that a template could contain.
_SENTINEL = "@@sentinel-7f3a@@"
# gpt-oss's channels: thoughts, answer and calls are messages of one turn.
_NEXT, _ANSWER = "<|end|><|start|>assistant", "<|channel|>final<|message|>"
_CHANNELS = tuple(f"<|channel|>{name}" for name in ("analysis<|message|>", "final<|message|>", "commentary"))
# How models mark tool calls: Qwen, GLM; Mistral; Llama; Granite, Phi; LFM; Kimi; DeepSeek.
_CALL_MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁sep｜>",
)
_MARKS = (
    *(mark for marks in THOUGHT_MARKS for mark in marks if mark != "<|end|>"),  # ends turns in other templates
    *_CALL_MARKS,
    *_CHANNELS,
    *(_NEXT + channel for channel in _CHANNELS),
    *("<|constrain|>", "<|message|>"),
)


class TurnTemplate:
    """The beginnings and the ends of turns under a tokenizer's chat template.

    Attributes:
        marks: token ids of the marks that a reply may hold (thoughts, channels, tool calls), the longest first.

    Raises:
        ValueError: there is no template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the target's tokenizer has no chat template: take a chat model")
        self.tokenizer = tokenizer
        self.special_ids = find_special_ids(tokenizer)
        self.marks = sorted((ids for mark in _MARKS if (ids := self._encode_mark(mark))), key=len, reverse=True)

    def encode_prompt(self, messages: Messages, role: Role, tools: Tools = None) -> list[int]:
        """Returns the token ids of everything before the role's next text.

        Raises:
            ConversationError: the template rejects these messages.
        """
        is_reply = role == "assistant"
        return self.encode(self.render_prompt(messages, tools) if is_reply else self.render_user_header(messages))

    def render_prompt(self, messages: Messages, tools: Tools = None) -> str:
        """Returns everything before the assistant's next text."""
        return self._render(messages, tools, is_prompt=True)

    def render_user_header(self, messages: Messages) -> str:
        """Returns everything before the user's next text. ChatML, first turn: `<|im_start|>user` and a line break."""
        return self._render_around([*messages, {"role": "user", "content": _SENTINEL}])[0]

    def split_reply(self, messages: Messages, text: str, tools: Tools = None) -> tuple[str, str] | None:
        """Splits a reply into (content, thoughts) so that the template writes exactly `text` after these messages.

        Training then reads what the target wrote. None if there is no such split.
        """
        try:
            before = self.render_prompt(messages, tools)
        except ConversationError:
            return None
        for thoughts, content in (("", text), *_split_channels(text), *split_thoughts(text, before)):
            reply = {"role": "assistant", "content": content} | ({"reasoning_content": thoughts} if thoughts else {})
            try:
                if self._render([*messages, reply], tools).startswith(before + text):
                    return content, thoughts
            except ConversationError:  # for example, marks within the content
                continue
        return None

    def has_marks(self, token_ids: Sequence[int]) -> bool:
        """Whether a reply holds special tokens that mark thoughts, channels or calls."""
        return len(drop_marks(token_ids, self.marks)) < len(token_ids)

    def find_turn_end(self, role: Role) -> int | None:
        """Returns the special token right after a turn's text; None if ordinary text follows."""
        opening = [] if role == "user" else [{"role": "user", "content": "Hi"}]
        _, after = self._render_around([*opening, {"role": role, "content": _SENTINEL}])
        ids = self.encode(after.lstrip())
        return ids[0] if ids and ids[0] in self.special_ids else None

    def find_stop_ids(self, eos_token_id: int | list[int] | None, *, needs_user: bool = False) -> dict[Role, set[int]]:
        """Returns the tokens that end a turn of each role; empty for the user if nothing marks the end.

        Those of the generation config (`eos_token_id`) end a reply as well.

        Raises:
            ValueError: nothing ends a reply, or a user turn where the target writes them (`needs_user`).
        """
        reply_ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
        found = {"user": [self.find_turn_end("user")], "assistant": [self.find_turn_end("assistant"), *reply_ends]}
        stop_ids: dict[Role, set[int]] = {"user": set(), "assistant": set()}
        for role, ends in stop_ids.items():
            ends |= {token_id for token_id in found[role] if token_id is not None}
        if not stop_ids["assistant"]:
            raise ValueError("neither the target's generation_config nor its chat template names an end of turn")
        if needs_user and not stop_ids["user"]:
            raise ValueError(
                "the chat template ends a user turn with ordinary text, so the end of a written user turn cannot be "
                "found: use --mode regenerate"
            )
        return stop_ids

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids))

    def _encode_mark(self, mark: str) -> list[int]:
        """Returns [] if the mark does not begin with its own special token (unknown words may become one too)."""
        ids = self.encode(mark)
        is_mark = bool(ids) and ids[0] in self.special_ids
        return ids if is_mark and mark.startswith(self.tokenizer.convert_ids_to_tokens(ids[0])) else []

    def _render(self, messages: Messages, tools: Tools = None, *, is_prompt: bool = False) -> str:
        return ChatRenderer(self.tokenizer, messages, tools=tools).render(messages, is_prompt=is_prompt)

    def _render_around(self, messages: Messages) -> tuple[str, str]:
        rendered = self._render(messages)
        if rendered.count(_SENTINEL) != 1:
            raise ValueError(f"the chat template writes one turn's text {rendered.count(_SENTINEL)} times: use another")
        before, _, after = rendered.partition(_SENTINEL)
        return before, after


def _split_channels(text: str) -> Iterator[tuple[str, str]]:
    """Yields (thoughts, answer) of a reply in gpt-oss's channels."""
    thought, _, answer = text.rpartition(_ANSWER)
    if text.startswith(_ANSWER):
        yield "", answer
    for thoughts, rest in split_thoughts(thought):
        if rest == _NEXT.removeprefix("<|end|>"):
            yield thoughts, answer
