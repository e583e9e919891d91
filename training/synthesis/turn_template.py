"""What a chat template puts around turns, found by rendering: where the next turn begins, and which token ends one."""

from __future__ import annotations

from typing import Any, Literal

from training.data.layouts import Messages
from training.data.reply_spans import find_special_ids

Role = Literal["user", "assistant"]
Tools = list[dict[str, Any]] | None

# Neither whitespace (templates trim) nor anything a template could contain.
_SENTINEL = "@@sentinel-7f3a@@"


class TurnTemplate:
    """A tokenizer's chat template, asked for the beginnings and the ends of turns.

    Raises:
        ValueError: there is no template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the target's tokenizer has no chat template: take a chat model")
        self.tokenizer = tokenizer
        self.special_ids = find_special_ids(tokenizer)

    def encode_prompt(self, messages: Messages, role: Role, tools: Tools = None) -> list[int]:
        """Token ids of all that stands before the role's next text.

        Raises:
            jinja2.TemplateError: the template refuses these messages.
        """
        is_reply = role == "assistant"
        return self.encode(self.render_prompt(messages, tools) if is_reply else self.render_user_header(messages))

    def render_prompt(self, messages: Messages, tools: Tools = None) -> str:
        """All that stands before the assistant's next text."""
        rendered = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        return str(rendered)

    def render_user_header(self, messages: Messages) -> str:
        """All that stands before the user's next text. ChatML, first turn: `<|im_start|>user` and a line break."""
        return self._render_around([*messages, {"role": "user", "content": _SENTINEL}])[0]

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

    def _render_around(self, messages: Messages) -> tuple[str, str]:
        rendered: str = self.tokenizer.apply_chat_template(messages, tokenize=False)
        if rendered.count(_SENTINEL) != 1:
            raise ValueError(f"the chat template writes one turn's text {rendered.count(_SENTINEL)} times: use another")
        before, _, behind = rendered.partition(_SENTINEL)
        return before, behind
