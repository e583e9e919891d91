"""What a chat template puts around turns, found by rendering: where the next turn begins, and which token ends one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jinja2 import TemplateError

from training.data.layouts import Messages
from training.data.reply_spans import find_special_ids
from training.data.thoughts import THOUGHT_MARKS, name_thoughts, split_thoughts
from training.synthesis.reply_decoding import drop_marks

Role = Literal["user", "assistant"]
Tools = list[dict[str, Any]] | None

# Neither whitespace (templates trim) nor anything a template could contain.
_SENTINEL = "@@sentinel-7f3a@@"
# gpt-oss's channels: what it thinks, says and calls are messages of one turn.
_NEXT, _ANSWER = "<|end|><|start|>assistant", "<|channel|>final<|message|>"
_CHANNELS = tuple(f"<|channel|>{name}" for name in ("analysis<|message|>", "final<|message|>", "commentary"))
# How models mark their calls of tools: Qwen, GLM; Mistral; Llama; Granite, Phi; LFM; Kimi; DeepSeek.
_CALL_MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁sep｜>",
)
_MARKS = (
    *(mark for marks in THOUGHT_MARKS for mark in marks if mark != "<|end|>"),  # which ends turns elsewhere
    *_CALL_MARKS,
    *_CHANNELS,
    *(_NEXT + channel for channel in _CHANNELS),
    *("<|constrain|>", "<|message|>"),
)


class TurnTemplate:
    """A tokenizer's chat template, asked for the beginnings and the ends of turns.

    Attributes:
        special_ids: of the tokenizer.
        marks: token ids of what a reply may hold of them: the target's own marks of thoughts, channels and calls of
            tools; the longest first.

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
        """Token ids of all that stands before the role's next text.

        Raises:
            jinja2.TemplateError: the template refuses these messages.
        """
        is_reply = role == "assistant"
        return self.encode(self.render_prompt(messages, tools) if is_reply else self.render_user_header(messages))

    def render_prompt(self, messages: Messages, tools: Tools = None) -> str:
        """All that stands before the assistant's next text."""
        return self._render(messages, tools, add_generation_prompt=True)

    def render_user_header(self, messages: Messages) -> str:
        """All that stands before the user's next text. ChatML, first turn: `<|im_start|>user` and a line break."""
        return self._render_around([*messages, {"role": "user", "content": _SENTINEL}])[0]

    def split_reply(self, messages: Messages, text: str, tools: Tools = None) -> tuple[str, str] | None:
        """(text, thoughts) that the template writes behind these messages exactly as the reply `text` stands there, so
        that training reads what the target wrote; None if there is no such way."""
        try:
            before = self.render_prompt(messages, tools)
        except TemplateError:
            return None
        for thoughts, content in (("", text), *_split_channels(text), *split_thoughts(text, before)):
            reply = {"role": "assistant", "content": content} | ({"reasoning_content": thoughts} if thoughts else {})
            try:
                if self._render([*messages, reply], tools).startswith(before + text):
                    return content, thoughts
            except TemplateError:  # marks within the content, for one
                continue
        return None

    def has_marks(self, token_ids: Sequence[int]) -> bool:
        """Whether a reply holds marks of thoughts, channels or calls that are special tokens."""
        return len(drop_marks(token_ids, self.marks)) < len(token_ids)

    def find_turn_end(self, role: Role) -> int | None:
        """The special token right behind a turn's text; None where there is ordinary text."""
        opening = [] if role == "user" else [{"role": "user", "content": "Hi"}]
        _, behind = self._render_around([*opening, {"role": role, "content": _SENTINEL}])
        ids = self.encode(behind.lstrip())
        return ids[0] if ids and ids[0] in self.special_ids else None

    def find_stop_ids(self, eos_token_id: int | list[int] | None, *, needs_user: bool = False) -> dict[Role, set[int]]:
        """The tokens that end a turn of each role; none for the user's where its end cannot be seen.

        Args:
            eos_token_id: the generation config's, which end a reply as well.
            needs_user: user turns are to be written.

        Raises:
            ValueError: nothing ends a reply, or a user turn that is needed.
        """
        reply_ends = {*(eos_token_id if isinstance(eos_token_id, list) else [eos_token_id])}
        found = {"user": {self.find_turn_end("user")}, "assistant": {self.find_turn_end("assistant"), *reply_ends}}
        stop_ids: dict[Role, set[int]] = {
            "user": {token_id for token_id in found["user"] if token_id is not None},
            "assistant": {token_id for token_id in found["assistant"] if token_id is not None},
        }
        if not stop_ids["assistant"]:
            raise ValueError("neither the target's generation_config nor its chat template names an end of turn")
        if needs_user and not stop_ids["user"]:
            raise ValueError(
                "the chat template ends a user turn with ordinary text, so that the end of one the target writes "
                "cannot be seen: use --mode regenerate"
            )
        return stop_ids

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids))

    def _encode_mark(self, mark: str) -> list[int]:
        """Nothing where it does not begin with a special token of its own (unknown words may have one, too)."""
        ids = self.encode(mark)
        is_mark = bool(ids) and ids[0] in self.special_ids
        return ids if is_mark and mark.startswith(self.tokenizer.convert_ids_to_tokens(ids[0])) else []

    def _render(self, messages: Messages, tools: Tools = None, **options: Any) -> str:
        named = name_thoughts(messages, self.tokenizer.get_chat_template(tools=tools))
        return str(self.tokenizer.apply_chat_template(named, tools=tools, tokenize=False, **options))

    def _render_around(self, messages: Messages) -> tuple[str, str]:
        rendered = self._render(messages)
        if rendered.count(_SENTINEL) != 1:
            raise ValueError(f"the chat template writes one turn's text {rendered.count(_SENTINEL)} times: use another")
        before, _, behind = rendered.partition(_SENTINEL)
        return before, behind


def _split_channels(text: str) -> Iterator[tuple[str, str]]:
    """(thoughts, answer) of gpt-oss's channels, if the reply is such."""
    thought, _, answer = text.rpartition(_ANSWER)
    if text.startswith(_ANSWER):
        yield "", answer
    for thoughts, rest in split_thoughts(thought):
        if rest == _NEXT.removeprefix("<|end|>"):
            yield thoughts, answer
