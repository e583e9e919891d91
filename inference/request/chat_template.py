"""Renders conversations with a target's chat template, for training and for everything that decodes.

Templates differ in how they read the same thing: texts or lists of parts, the arguments of tool calls as objects or as
JSON text, an empty text or null beside a call. What a template does not read vanishes, or is written as Python prints
it. So a conversation is first rendered with a mark in place of each text, in one way after the other, until every mark
is written. If none of the ways writes them all, the conversation is refused.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes
from transformers.utils.chat_template_utils import render_jinja_template

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
_Marked = tuple[dict[str, Any], list[str]]

# A template is a program: its own exceptions, and those of Python's operators, methods and filters.
_FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
# A template's key for the thoughts of a message: the first one in nearly all, the second in gpt-oss.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_MAX_REASON = 300
# What a template reads beside the variables that a user may set.
_NO_VARIABLES = {"messages", "tools", "raise_exception", "strftime_now"}
# Jinja's tests and filters for variables that may not be set.
_ASKS = {"defined", "undefined", "default", "d"}
_DATE = re.compile(r"\d{1,2} [A-Z][a-z]{2,8} \d{4}|[A-Z][a-z]{2,8} \d{1,2},? \d{4}|\d{4}-\d\d-\d\d")


class ConversationError(ValueError):
    """A conversation that the chat template cannot write, or not all of it.

    Attributes:
        reason: one line, of which the template is the subject where it says "it".
        kind: the reason without names and numbers, to count conversations by.
        field: what is wrong: "messages", "tools" or "chat_template_kwargs".
    """

    def __init__(self, reason: str, *, kind: str = "", field: str = "messages") -> None:
        super().__init__(f"the chat template rejects the conversation: {reason}")
        self.reason, self.kind, self.field = reason, kind or reason, field


def encode_prompt(
    tokenizer: Any, messages: Messages, *, tools: Tools = None, variables: dict[str, Any] | None = None
) -> list[int]:
    """The token ids of a conversation up to where the assistant's next turn begins.

    Args: those of `ChatRenderer`.
    """
    text = ChatRenderer(tokenizer, messages, tools=tools, variables=variables).render(messages, is_prompt=True)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render_probe(tokenizer: Any) -> str:
    """A short conversation as a prompt, which shows the template, its default system prompt and its thinking mode; ""
    for a template that rejects it, or none. The date, which some templates write, is left out."""
    messages = [{"role": role, "content": text} for role, text in (("user", "A"), ("assistant", "B"), ("user", "C"))]
    if not tokenizer.chat_template:
        return ""
    try:
        return _DATE.sub("DATE", ChatRenderer(tokenizer, messages).render(messages, is_prompt=True))
    except ConversationError:
        return ""


@dataclass(frozen=True)
class _Way:
    """A way to hand a conversation to a template.

    Attributes:
        part_roles: roles whose texts are lists of parts.
        has_text_arguments: the arguments of tool calls are JSON text, not objects.
        has_null: a turn with tool calls and without a text has null, not "".
    """

    part_roles: frozenset[str] = frozenset()
    has_text_arguments: bool = False
    has_null: bool = False


class ChatRenderer:
    """Renders one conversation, whole or in parts.

    Args:
        messages: `role`, and `content`: text, null, or a list of parts. Further keys are the template's: `tool_calls`
            (arguments: an object or JSON text), thoughts under any of their usual keys, and others. `function_call` is
            a tool call, and `refusal` the content of a turn without one. The role developer is system where the
            template does not name it; function is tool.
        tools: JSON schemas of functions to call.
        template: of a processor; None = the tokenizer's.
        variables: values for variables that the template reads, such as `enable_thinking`.

    Attributes:
        left_out: the indices of system texts that the template writes in the prompt of the next question only.

    Raises:
        ConversationError: the template raises; it does not write a text, a called function's name or the tools; it does
            not read a variable.
        ValueError: there is no template.
    """

    def __init__(
        self,
        tokenizer: Any,
        messages: Messages,
        *,
        tools: Tools = None,
        template: str | None = None,
        variables: dict[str, Any] | None = None,
    ) -> None:
        self.tools = tools or None
        self.template: str = tokenizer.get_chat_template(template, tools=self.tools)
        self._variables = {**tokenizer.special_tokens_map, **(variables or {})}
        if variables:
            self._check_variables(variables)
        self.left_out: list[int] = []
        self._way = self._find_way(messages)
        if self.tools:
            self._check_tools(messages)

    def render(self, messages: Messages, *, is_prompt: bool = False) -> str:
        """Returns the conversation, or a part of it, as text.

        Args:
            is_prompt: append the header of the assistant's next turn.
        """
        return self._apply(messages, self._way, add_generation_prompt=is_prompt)[0]

    def render_marked(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text, and the first character and the end of each `{% generation %}` block of the template."""
        # Not `apply_chat_template`: its mask is wrong for empty replies and for characters without a token.
        return self._apply(messages, self._way, return_assistant_tokens_mask=True)

    def _apply(self, messages: Messages, way: _Way, **options: Any) -> tuple[str, list[tuple[int, int]]]:
        prepared = [self._hand_over(self._normalize(message), way) for message in messages]
        options = {"tools": self.tools, **options, **self._variables}
        try:
            rendered: Any = render_jinja_template([prepared], chat_template=self.template, **options)
            text: str = rendered[0][0]
            text.encode()  # halves of a surrogate pair are no text
        except _FAULTS as error:
            name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            reason = f"{name}{error}".partition("\n")[0][:_MAX_REASON]
            raise ConversationError(reason) from error
        return text, next(iter(rendered[1]), [])

    def _normalize(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message without what says nothing, and with the names that the template knows."""
        fields = {name: value for name, value in message.items() if value is not None and name not in _THOUGHTS}
        knows_developers = re.search(r"['\"]developer['\"]", self.template)
        names = {"function": "tool"} | ({} if knows_developers else {"developer": "system"})
        fields["role"] = names.get(fields["role"], fields["role"])
        content, refusal = fields.get("content", ""), fields.pop("refusal", "")
        if content and refusal:
            raise ConversationError("a turn has a content and a refusal, and templates read one text: leave one out")
        content = content or refusal
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(part["text"] for part in content)
        thoughts = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
        if thoughts is not None:
            fields[_find_thoughts_key(self.template)] = thoughts
        calls = fields.pop("tool_calls", [])
        if not isinstance(calls, list):
            raise ConversationError(f"tool_calls is {type(calls).__name__}, and templates read a list")
        if function := fields.pop("function_call", None):
            calls = [*calls, {"type": "function", "function": function}]
        return {**fields, "content": content} | ({"tool_calls": calls} if calls else {})

    @staticmethod
    def _hand_over(message: dict[str, Any], way: _Way) -> dict[str, Any]:
        content = message["content"]
        if way.has_null and content == "" and "tool_calls" in message:
            content = None
        elif isinstance(content, str) and message["role"] in way.part_roles:
            content = [{"type": "text", "text": content}]
        handed = {**message, "content": content}
        if "tool_calls" in message:
            handed["tool_calls"] = change_calls(message, write_arguments if way.has_text_arguments else _read_arguments)
        return handed

    def _find_way(self, messages: Messages) -> _Way:
        normalized = [self._normalize(message) for message in messages]
        marked = [_mark(message, index) for index, message in enumerate(normalized)]
        given = frozenset(message["role"] for message, _ in marked if isinstance(message["content"], list))
        faults: list[ConversationError] = []
        losses: list[list[int]] = []
        for first in _list_ways(message for message, _ in marked):
            way = replace(first, part_roles=given)
            for _ in range(2):  # the roles whose texts are lost in the first round have parts in the second
                lost = list(range(len(marked)))
                try:
                    lost = self._find_lost(marked, way)
                    losses.append(lost)
                except ConversationError as error:
                    faults.append(error)
                if not lost:
                    return way
                way = replace(way, part_roles=given | {marked[index][0]["role"] for index in lost})
        if not losses:
            # What the template says itself tells more than what Python says.
            raise min(faults, key=lambda error: type(error.__cause__) is not TemplateError)
        index = min(losses, key=len)[0]
        calls = " and ".join(repr(_find_function(call)["name"]) for call in normalized[index].get("tool_calls", ()))
        role = f"the text of role {messages[index]['role']!r}"
        raise ConversationError(
            f"it does not write {f'the call of {calls}' if calls else role} (message {index + 1})",
            kind=f"it does not write {'tool calls' if calls else role}",
        )

    def _find_lost(self, marked: Sequence[_Marked], way: _Way) -> list[int]:
        """Returns the indices of the messages that are not written, neither here nor in a prompt that this grew from.

        Mistral's templates write the system's text before the last message only, if that is the user's.
        """
        roles = [message["role"] for message, _ in marked]
        lost: list[int] = []
        self.left_out = []
        for index in self._find_unwritten(marked, way):
            end = roles.index("user", index) + 1 if roles[index] == "system" and "user" in roles[index:] else 0
            is_lost = index >= end or index in self._find_unwritten(marked[:end], way)
            (lost if is_lost else self.left_out).append(index)
        return lost

    def _find_unwritten(self, marked: Sequence[_Marked], way: _Way) -> list[int]:
        """Returns the indices of the messages that are not written whole, or are written as Python prints objects."""
        messages = [message for message, _ in marked]
        text, _ = self._apply(messages, way, add_generation_prompt=_is_open(messages))
        unwritten = []
        for index, (message, marks) in enumerate(marked):
            handed = self._hand_over(message, way)
            arguments = [_find_function(call)["arguments"] for call in handed.get("tool_calls", ())]
            is_written = all(mark in text and f"'text': '{mark}'" not in text for mark in marks)
            if not is_written or any(_is_printed_by_python(each, text) for each in arguments):
                unwritten.append(index)
        return unwritten

    def _check_tools(self, messages: Messages) -> None:
        options = {"add_generation_prompt": _is_open(messages)}
        try:
            without, _ = self._apply(messages, self._way, **options, tools=None)
        except ConversationError:  # it needs them
            return
        if without == self._apply(messages, self._way, **options)[0]:
            raise ConversationError("it writes nothing of the tools", field="tools")

    def _check_variables(self, variables: dict[str, Any]) -> None:
        read = _find_variables(self.template)
        if unread := sorted(variables.keys() - read):
            own = sorted(name for name in read if not name.endswith("_token"))  # special tokens
            raise ConversationError(
                f"it does not read {unread[0]!r}; it reads {', '.join(own) or 'no variables'}",
                field="chat_template_kwargs",
            )


def _is_open(messages: Messages) -> bool:
    """Whether the assistant's turn is next."""
    return bool(messages) and messages[-1]["role"] != "assistant"


def _list_ways(messages: Iterator[dict[str, Any]]) -> list[_Way]:
    """The ways to hand over tool calls, the best first."""
    calling = [message for message in messages if "tool_calls" in message]
    nulls = (False, True) if any(message["content"] == "" for message in calling) else (False,)
    pairs = itertools.product((False, True) if calling else (False,), nulls)
    return [_Way(has_text_arguments=is_text, has_null=is_null) for is_text, is_null in pairs]


def _mark(message: dict[str, Any], index: int) -> _Marked:
    """A message with marks in place of its texts, and those marks that must be written.

    Of a message with calls these are the functions' names: several templates leave out a text beside calls.
    """
    mark, content, calls = f"@@turn-{index}-7f3a@@", message["content"], message.get("tool_calls", [])
    marks: list[str] = []
    if isinstance(content, str) and (content or not calls):
        content, marks = mark, [mark]
    elif isinstance(content, list):
        content = [{**part, "text": mark} if isinstance(part, dict) and part.get("text") else part for part in content]
        marks = [mark] if content != message["content"] else []
    marked = {**message, "content": content}
    if calls:
        marks = [f"call_{index}_{number}_7f3a" for number in range(len(calls))]
        names = iter(marks)
        marked["tool_calls"] = change_calls(message, lambda function: {**function, "name": next(names)})
    return marked, marks


def change_calls(message: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the message's tool calls with each function (its `name` and `arguments`) changed."""
    functions = [(call, change(_find_function(call))) for call in message["tool_calls"]]
    return [{**call, "function": function} if "function" in call else function for call, function in functions]


def write_arguments(function: dict[str, Any]) -> dict[str, Any]:
    """A called function with its arguments as JSON text, as OpenAI's API has it."""
    arguments = function["arguments"]
    return function if isinstance(arguments, str) else {**function, "arguments": _to_json(arguments)}


def _read_arguments(function: dict[str, Any]) -> dict[str, Any]:
    """A called function with its arguments as an object, if they are the JSON text of one."""
    arguments = function["arguments"]
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = None
    return {**function, "arguments": read} if isinstance(read, dict) else function


def _find_function(call: Any) -> dict[str, Any]:
    """The called function; one without arguments gets an empty object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConversationError(f"a tool call names no function: {call!r:.80}")
    return {**function, "arguments": function.get("arguments") or {}}


def _is_printed_by_python(arguments: Any, text: str) -> bool:
    """Whether an object stands in the text as `{'key': True}`, which is no JSON."""
    printed = str(arguments)
    return isinstance(arguments, dict) and printed != _to_json(arguments) and printed in text


def _to_json(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


@cache
def _find_thoughts_key(template: str) -> str:
    """The name under which a template reads the thoughts of a message."""
    reads = (name for name in _THOUGHTS if re.search(rf"\w\.{name}\b|['\"]{name}['\"]", template))
    return next(reads, _THOUGHTS[0])


@cache
def _find_variables(template: str) -> frozenset[str]:
    """The variables of a template that its user may set, such as `enable_thinking`; special tokens are among them.

    A name that the template sets itself is one only if the template asks whether it is set:

        {% set content = m.content %}{{ content }}                                    -> none
        {% if style is not defined %}{% set style = 'short' %}{% endif %}{{ style }}   -> style
    """
    # Blocks of transformers' own, which Jinja cannot read, hold nothing back.
    without = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without)
    own = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    arguments = [
        id(name)
        for macro in parsed.find_all(nodes.Macro)
        for name in macro.find_all(nodes.Name)
        if name.name in {argument.name for argument in macro.args}
    ]
    asking = (each.node for each in parsed.find_all((nodes.Test, nodes.Filter)) if each.name in _ASKS)
    asked = {name.name for name in asking if isinstance(name, nodes.Name) and id(name) not in arguments}
    return frozenset(meta.find_undeclared_variables(parsed) - _NO_VARIABLES - (own - asked))
