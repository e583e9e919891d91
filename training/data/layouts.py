"""From a record of a data set, in whatever columns it came, to a conversation.

`LAYOUTS` is the list of layouts that are known: one line each. The first whose columns a record has is its layout,
unless one is named (`--dataset_format`) or the columns are (`--columns prompt=problem response=solution`).

Worked example:

    {"instruction": "Add.", "input": "1 + 1", "output": "2"}
        -> [{"role": "user", "content": "Add.\\n\\n1 + 1"}, {"role": "assistant", "content": "2"}]
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

# `role` and `content` are text; beside them may stand `reasoning_content` (thoughts), `tool_calls`, `tool_call_id` and
# `name`.
Messages = list[dict[str, Any]]

_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
# Under which names thoughts come, and the one name chat templates read.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Layout:
    """Which column holds what; "" = there is none.

    Either `turns` (a list of turns; if `alternates`, also of texts by user and assistant in turn), or `prompt` and
    `response` (texts, or lists of turns). Optional, and so not looked for: `context` (joins the prompt), `system` and
    `tools`.
    """

    turns: str = ""
    prompt: str = ""
    response: str = ""
    context: str = ""
    system: str = "system"
    tools: str = "tools"
    alternates: bool = False

    @property
    def required(self) -> list[str]:
        return [self.turns] if self.turns else [self.prompt, self.response]


# In the order in which they are looked for: turns say more than a prompt and a response beside them.
_KNOWN: tuple[tuple[str, Layout], ...] = (
    ("messages", Layout(turns="messages")),
    ("sharegpt", Layout(turns="conversations")),
    ("lmsys", Layout(turns="conversation")),
    ("ultrachat", Layout(turns="data", alternates=True)),
    ("alpaca", Layout(prompt="instruction", response="output", context="input")),
    ("dolly", Layout(prompt="instruction", response="response", context="context")),
    ("gsm8k", Layout(prompt="question", response="answer")),
    ("openorca", Layout(prompt="question", response="response", system="system_prompt")),
    ("metamath", Layout(prompt="query", response="response")),
    ("prompt_completion", Layout(prompt="prompt", response="completion")),
    ("prompt_response", Layout(prompt="prompt", response="response")),
    ("preference", Layout(prompt="prompt", response="chosen")),
)
# A data set's name -> the layouts it is published in.
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    **{name: (layout,) for name, layout in _KNOWN},
    "ultrachat": (Layout(turns="messages"), Layout(turns="data", alternates=True)),
    "magpie": (Layout(turns="conversations"), Layout(prompt="instruction", response="response")),
    "codealpaca": tuple(layout for name, layout in _KNOWN if name in ("alpaca", "prompt_completion")),
}
COLUMN_ROLES = ("messages", "prompt", "response", "context", "system", "tools")


@dataclass(frozen=True)
class RecordFormat:
    """How a set's records are to be read.

    Args:
        name: a key of `LAYOUTS`, or "auto": look at the columns of each record.
        columns: role (of `COLUMN_ROLES`) -> column; empty = those of the layout.
    """

    name: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str, items: Sequence[str]) -> RecordFormat:
        """Of options: columns as ROLE=COLUMN each, or as one JSON object.

        Raises:
            ValueError: an unknown layout, or columns that make none.
        """
        columns: dict[str, str] = {}
        for item in items:
            role, equals, column = item.partition("=")
            if item.startswith("{"):  # a mapping of a YAML file
                columns |= json.loads(item)
            elif role and equals and column:
                columns[role] = column
            else:
                raise ValueError(
                    f"got columns {item!r}: write ROLE=COLUMN, for example prompt=question response=answer"
                )
        return cls(name, columns)

    def __post_init__(self) -> None:
        if self.name != "auto" and self.name not in LAYOUTS:
            near = difflib.get_close_matches(self.name, LAYOUTS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"got dataset_format {self.name!r}: give auto, {', '.join(LAYOUTS)} (did you mean {near!r}?)"
            )
        if not self.columns:
            return
        if self.name != "auto":
            raise ValueError(f"got dataset_format {self.name!r} and columns {dict(self.columns)}: give one of the two")
        for role in self.columns:
            if role not in COLUMN_ROLES:
                raise ValueError(f"got columns {role}={self.columns[role]}: name one of {', '.join(COLUMN_ROLES)}")
        is_complete = "messages" in self.columns or {"prompt", "response"} <= self.columns.keys()
        if not is_complete or {"messages", "prompt"} <= self.columns.keys():
            raise ValueError(
                f"got columns {dict(self.columns)}: name messages=COLUMN, or prompt=COLUMN and response=COLUMN"
            )

    def find_layout(self, record: Mapping[str, Any]) -> Layout:
        """The layout of a record.

        Raises:
            ValueError: the record lacks columns; names those that it has, and the nearest.
        """
        if self.columns:
            named = {("turns" if role == "messages" else role): column for role, column in self.columns.items()}
            layout = Layout(**{"system": "", "tools": "", **named}, alternates=True)
            for column in self.columns.values():  # null where a record has none of it
                if column not in record:
                    raise ValueError(_missing_column(column, record))
            return layout
        candidates = [layout for _, layout in _KNOWN] if self.name == "auto" else LAYOUTS[self.name]
        for layout in candidates:
            if all(record.get(column) is not None for column in layout.required):
                return layout
        if self.name != "auto":
            raise ValueError(_missing_column(candidates[-1].required[0], record, candidates))
        filled = sorted(column for column, value in record.items() if value is not None)
        name, nearest = max(_KNOWN, key=lambda known: _likeness(known[1].required, filled))
        raise ValueError(
            f"got the columns {filled}, which are of no known layout (nearest: {name}, with "
            f"{' and '.join(nearest.required)}); name them with --columns messages=COLUMN, or prompt=COLUMN "
            "response=COLUMN"
        )


AUTO = RecordFormat()


def parse_conversation(record: Any, record_format: RecordFormat = AUTO) -> Messages:
    """A record as messages.

    Raises:
        ValueError: what is wrong with it.
    """
    messages: Messages = parse_record(record, record_format)["messages"]
    return messages


def parse_record(record: Any, record_format: RecordFormat = AUTO) -> dict[str, Any]:
    """A record as `messages`, and `tools` if it has any.

    Raises:
        ValueError: what is wrong with it.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {type(record).__name__}")
    layout = record_format.find_layout(record)
    if layout.turns:
        messages = _parse_turns(record[layout.turns], layout.turns, alternates=layout.alternates)
    else:
        messages = _parse_pair(record, layout)
    system = record.get(layout.system)
    if system and messages[0]["role"] != "system":
        if not isinstance(system, str):
            raise ValueError(f"`{layout.system}` is {type(system).__name__}, expected text")
        messages.insert(0, {"role": "system", "content": system})
    tools = _parse_json(record.get(layout.tools))
    if not tools:
        return {"messages": messages}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"`{layout.tools}` is {type(tools).__name__}, expected a list of JSON schemas")
    return {"messages": messages, "tools": tools}


def _parse_pair(record: Mapping[str, Any], layout: Layout) -> Messages:
    prompt, response = record[layout.prompt], record[layout.response]
    if isinstance(response, list) and isinstance(prompt, str):  # preference sets repeat the prompt in their `chosen`
        messages = _parse_turns(response, layout.response)
        return messages if messages[0]["role"] != "assistant" else [{"role": "user", "content": prompt}, *messages]
    if isinstance(prompt, list) and isinstance(response, list):
        return [*_parse_turns(prompt, layout.prompt), *_parse_turns(response, layout.response)]
    context = record.get(layout.context) or ""
    for column, text in ((layout.prompt, prompt), (layout.response, response), (layout.context, context)):
        if not isinstance(text, str):
            raise ValueError(f"`{column}` is {type(text).__name__}, expected text")
    if context.strip():
        prompt = f"{prompt}\n\n{context}"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _parse_turns(turns: Any, column: str, *, alternates: bool = False) -> Messages:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"expected a non-empty list `{column}`, got {turns!r:.60}")
    if alternates and all(isinstance(turn, str) for turn in turns):
        roles = ("user", "assistant")
        return [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
    return [_parse_turn(turn) for turn in turns]


def _parse_turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ValueError(f"expected a turn with role and content, got {type(turn).__name__}")
    turn = {key: value for key, value in turn.items() if value is not None}  # what Parquet writes where a key is absent
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"unknown role {role!r}; known roles: {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": _ROLES[role]}
    calls = _parse_json(turn.get("tool_calls"))
    if isinstance(content, list):
        content = _join_parts(content, role)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"the content of a {role} turn is {type(content).__name__}, expected text")
    message["content"] = content
    thoughts = next((turn[name] for name in _THOUGHTS if isinstance(turn.get(name), str)), None)
    if thoughts is not None:
        message["reasoning_content"] = thoughts
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ValueError(f"the tool_calls of a {role} turn are {type(calls).__name__}, expected a list of objects")
        message["tool_calls"] = [_parse_call(call) for call in calls]
    for name in ("tool_call_id", "name"):
        if isinstance(turn.get(name), str):
            message[name] = turn[name]
    return message


def _join_parts(parts: Sequence[Any], role: str) -> str:
    """[{"type": "text", "text": "Hi"}, ...] -> the texts."""
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            kind = part.get("type", "no type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"a part of a {role} turn is of type {kind!r}, and only text can be trained on")
    return "".join(str(text) for text in texts)


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI writes them as text, chat templates expect the object."""
    call = {key: value for key, value in call.items() if value is not None}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call names no function: {json.dumps(call)[:80]}")
    function = {**function, "arguments": _parse_json(function.get("arguments", {}))}
    return {**call, "function": function} if "function" in call else function


def _parse_json(value: Any) -> Any:
    """What JSON text stands for; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError:
        return value


def _likeness(wanted: Sequence[str], columns: Sequence[str]) -> float:
    """How alike names are, from 0 to 1: the mean over those wanted of that of the nearest column."""
    ratios = [max((SequenceMatcher(None, name, column).ratio() for column in columns), default=0) for name in wanted]
    return sum(ratios) / len(ratios)


def _missing_column(column: str, record: Collection[str], candidates: Sequence[Layout] = ()) -> str:
    near = difflib.get_close_matches(column, list(record), n=1, cutoff=0.0)
    expected = " or ".join(" and ".join(map(repr, layout.required)) for layout in candidates) or repr(column)
    return (
        f"expected the column {expected}; there are {sorted(record)}"
        + (f" (nearest: {near[0]!r})" if near else "")
        + "; name them with --columns, for example prompt=question response=answer"
    )
