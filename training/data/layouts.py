"""Turns a record of a data set, whatever its columns, into a conversation.

`LAYOUTS` lists the known layouts, one line each. A record has the first layout whose columns it fills, unless the user
names the columns (`--columns prompt=problem response=solution`).

Worked example:

    {"instruction": "Add.", "input": "1 + 1", "output": "2"}
        -> [{"role": "user", "content": "Add.\\n\\n1 + 1"}, {"role": "assistant", "content": "2"}]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.training.images.references import is_image_part, place_images

# A message has `role` and `content` (text, or a list of parts if it has images), and optionally `reasoning_content`
# (thoughts), `tool_calls`, `tool_call_id`, `name`, `learn`: False for a reply that is context only, and `truncated`:
# True for a last reply that was cut off, whose end is not learned.
Messages = list[dict[str, Any]]

_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot", "function_call", "tool_call"), "assistant"),
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response", "ipython"), "tool"),
}
# Roles of a turn that is a call: ShareGPT's and ms-swift's.
_CALLING = ("function_call", "tool_call")
# Columns of what heads are not trained on. The text alone would be another conversation.
_MEDIA = ("video", "videos", "audio", "audios")
# Keys of a turn that hold its thoughts; we keep the first name, which most chat templates read.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Keys of a turn that say whether it is learned: OpenAI's, ms-swift's two, Axolotl's two.
_LEARNS_WHOLE = ("weight", "loss", "loss_scale", "train", "training")
# Axolotl's keys for parts of a turn.
_LEARNS_PARTS = ("train_detail", "training_detail")
LEARNS = (*_LEARNS_WHOLE, *_LEARNS_PARTS)
# Columns of a record that say whether its reply is wanted: KTO's, and LLaMA-Factory's name for the same.
IS_WANTED = ("label", "kto_tag")
_LEFT_OUT = "columns `{}`, which are left out: the conversation begins with another system turn"


@dataclass(frozen=True)
class Layout:
    """The column of each part of a conversation; "" = the layout has no such column.

    A layout has either `turns` (a list of turns; with `alternates`, also a list of texts by user and assistant in
    turn), or `prompt` and `response` (texts, or lists of turns). The other columns are optional: `context` is appended
    to the prompt, and `history` has the turns before the prompt. `functions` is OpenAI's former name for `tools`.
    """

    turns: str = ""
    prompt: str = ""
    response: str = ""
    context: str = ""
    history: str = "history"
    system: str = "system"
    tools: str = "tools"
    functions: str = "functions"
    alternates: bool = False

    @property
    def required(self) -> list[str]:
        return [self.turns] if self.turns else [self.prompt, self.response]


# In the order of the search: a list of turns says more than a prompt and a response in the same record.
LAYOUTS: dict[str, Layout] = {
    "messages, Ultrachat": Layout(turns="messages"),
    "ShareGPT, Magpie": Layout(turns="conversations"),
    "LMSYS": Layout(turns="conversation"),
    "Ultrachat as first published": Layout(turns="data", alternates=True),
    "Alpaca": Layout(prompt="instruction", response="output", context="input"),
    "Dolly": Layout(prompt="instruction", response="response", context="context"),
    "GSM8K": Layout(prompt="question", response="answer"),
    "OpenOrca": Layout(prompt="question", response="response", system="system_prompt"),
    "MetaMath": Layout(prompt="query", response="response"),
    "prompt and completion, CodeAlpaca": Layout(prompt="prompt", response="completion"),
    "prompt and response": Layout(prompt="prompt", response="response"),
    "preferences": Layout(prompt="prompt", response="chosen"),
}
COLUMN_ROLES = ("messages", "prompt", "response", "context", "history", "system", "tools")


@dataclass(frozen=True)
class RecordFormat:
    """How to read the records of a set.

    Args:
        columns: role (of `COLUMN_ROLES`) -> column; empty = choose the layout of each record by its columns.
        media_folder: where relative paths of images begin; "" = in the folder of the record's file.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    media_folder: str = ""

    @classmethod
    def parse(cls, items: Sequence[str], media_folder: str | None = None) -> RecordFormat:
        """Reads the option `columns`: items ROLE=COLUMN, or one JSON object.

        Raises:
            ValueError: columns that do not make a layout.
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
        return cls(columns, str(Path(media_folder).expanduser().absolute()) if media_folder else "")

    def __post_init__(self) -> None:
        if not self.columns:
            return
        for role in self.columns:
            if role not in COLUMN_ROLES:
                raise ValueError(f"got columns {role}={self.columns[role]}: name one of {', '.join(COLUMN_ROLES)}")
        is_complete = "messages" in self.columns or {"prompt", "response"} <= self.columns.keys()
        if not is_complete or ("messages" in self.columns and self.columns.keys() - {"messages", "system", "tools"}):
            raise ValueError(
                f"got columns {dict(self.columns)}: name messages=COLUMN, or prompt=COLUMN and response=COLUMN (and "
                "context=, history=)"
            )

    def find_layout(self, record: Mapping[str, Any]) -> Layout:
        """Returns the layout of a record.

        Raises:
            ValueError: the record lacks a column; the message names the columns it has.
        """
        if missing := [column for column in self.columns.values() if column not in record]:
            raise ValueError(
                f"expected the columns {' and '.join(map(repr, missing))}; there are {sorted(record)}; name them with "
                "--columns, for example prompt=question response=answer"
            )
        if self.columns:
            named = {("turns" if role == "messages" else role): column for role, column in self.columns.items()}
            return Layout(**{"history": "", "system": "", "tools": "", "functions": "", **named}, alternates=True)
        for layout in LAYOUTS.values():
            if all(record.get(column) is not None for column in layout.required):
                return layout
        filled = sorted(column for column, value in record.items() if value is not None)
        raise ValueError(
            f"got the columns {filled}, which no known layout has; name them with --columns messages=COLUMN, or "
            "prompt=COLUMN response=COLUMN"
        )


AUTO = RecordFormat()


def parse_record(record: Any, record_format: RecordFormat = AUTO, folder: Path | None = None) -> dict[str, Any]:
    """Returns a record as `messages`, and `tools` if the record has any.

    If there are images, the first key is `media`, their references in order (`draftsmith.training.images.references`),
    and the content of a message with images is a list of parts. `note` says what was left out.

    Args:
        folder: of the record's file.

    Raises:
        ValueError: the record is not a conversation; the message says why.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {type(record).__name__}")
    if others := [column for column in _MEDIA if record.get(column)]:
        raise ValueError(
            f"the conversation has `{'`, `'.join(others)}`, and heads are trained on text and images; heads that were "
            "trained on text also draft after videos and sounds"
        )
    layout = record_format.find_layout(record)
    column = next((name for name in IS_WANTED if _is_false(record.get(name))), "")
    if column and not (layout.turns and record_format.columns):
        cure = "name the columns to read with --columns" if layout.turns else "rename it"
        raise ValueError(
            f"`{column}` is false, which marks a reply to avoid, and heads learn every reply: leave the record out; "
            f"where the column means something else, {cure}"
        )
    if layout.turns:
        messages = _parse_turns(record[layout.turns], layout.turns, alternates=layout.alternates)
    else:
        messages = [*_parse_history(record, layout), *_parse_pair(record, layout)]
    system = record.get(layout.system)
    if system and not isinstance(system, str):
        raise ValueError(f"`{layout.system}` is {type(system).__name__}, expected text")
    note = ""
    if system and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    elif system and messages[0]["content"] != system:
        note = _LEFT_OUT.format(layout.system)
    media = place_images(record, messages, Path(record_format.media_folder or folder or "").expanduser())
    parsed: dict[str, Any] = {"media": media, "messages": messages} if media else {"messages": messages}
    if note:
        parsed["note"] = note
    tools = _parse_json(record.get(layout.tools)) or _parse_functions(record.get(layout.functions))
    if not tools:
        return parsed
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"`{layout.tools}` is {type(tools).__name__}, expected a list of JSON schemas")
    return {**parsed, "tools": tools}


def _is_false(value: Any) -> bool:
    """Whether a column `label` says no; 0 is False too."""
    return value == 0 or (isinstance(value, str) and value.strip().lower() == "false")


def _parse_functions(value: Any) -> list[dict[str, Any]]:
    """The tools of a column `functions`; [] for a column that means something else."""
    functions = _parse_json(value)
    if not isinstance(functions, list) or not all(isinstance(one, dict) and "name" in one for one in functions):
        return []
    return [{"type": "function", "function": function} for function in functions]


def _parse_pair(record: Mapping[str, Any], layout: Layout) -> Messages:
    prompt, response = record[layout.prompt], record[layout.response]
    if isinstance(response, list) and isinstance(prompt, str):  # preference sets repeat the prompt in `chosen`
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


def _parse_history(record: Mapping[str, Any], layout: Layout) -> Messages:
    """The turns before the prompt: a list of turns, of pairs of texts (prompt, response), or of those texts."""
    history = record.get(layout.history)
    if not history:
        return []
    is_list = isinstance(history, list)
    has_pairs = is_list and all(isinstance(item, list) and len(item) == 2 for item in history)
    turns = [text for pair in history for text in pair] if has_pairs else history
    if not is_list or not any(all(isinstance(turn, kind) for turn in turns) for kind in (str, dict)):
        raise ValueError(
            f"`{layout.history}` is {history!r:.60}, expected pairs of texts (prompt, response) or turns; where the "
            "column means something else, name the columns to read with --columns"
        )
    return _parse_turns(turns, layout.history, alternates=True)


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
    turn = {key: value for key, value in turn.items() if value is not None}  # Parquet has every key
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"unknown role {role!r}; known roles: {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": _ROLES[role]}
    calls = _parse_json(turn.get("tool_calls"))
    if role in _CALLING:
        calls, content = _parse_function_call(content), None
    elif turn.get("function_call"):
        calls = _parse_function_call(turn["function_call"])
    if isinstance(content, list):
        content = _join_parts(content, role)
    if content is None and calls:
        content = ""
    if not isinstance(content, str | list):
        raise ValueError(f"the content of a turn of {role} is {type(content).__name__}, expected text")
    message["content"] = content
    thoughts = next((turn[name] for name in _THOUGHTS if isinstance(turn.get(name), str)), None)
    if thoughts is not None:
        message["reasoning_content"] = thoughts
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ValueError(
                f"the tool_calls of a turn of {role} are {type(calls).__name__}, expected a list of objects"
            )
        message["tool_calls"] = [_parse_call(call) for call in calls]
    for name in ("tool_call_id", "name"):
        if isinstance(turn.get(name), str):
            message[name] = turn[name]
    if not _is_learned(turn, message["role"]):
        message["learn"] = False
    if turn.get("truncated") is True:
        message["truncated"] = True
    return message


def _is_learned(turn: Mapping[str, Any], role: str) -> bool:
    """Whether a turn may be learned; False only for the assistant's turns."""
    if part := next((key for key in _LEARNS_PARTS if key in turn), ""):
        raise ValueError(
            f"a turn of {role} has {part}, and heads learn whole turns: split the turn, or leave {part} out"
        )
    marks = {key: turn[key] for key in _LEARNS_WHOLE if key in turn}
    for key, value in marks.items():
        if value not in (0, 1):
            raise ValueError(f"{key} of a turn of {role} is {value!r}, expected 1 or true (learned), 0 or false (not)")
    if role == "assistant":
        return all(marks.values())
    if wanted := next((key for key, value in marks.items() if value and key != "weight"), ""):
        raise ValueError(
            f"{wanted} of a turn of {role} is {marks[wanted]!r}, and heads learn the assistant's turns: leave it out"
        )
    return True


def _join_parts(parts: Sequence[Any], role: str) -> str | list[dict[str, Any]]:
    """Joins [{"type": "text", "text": "Hi"}, ...]; parts with images among them stay parts."""
    kept: list[dict[str, Any]] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if is_image_part(part):
            kept.append(part)
        elif isinstance(text, str):
            kept.append({"type": "text", "text": text})
        else:
            kind = part.get("type", "no type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(
                f"a part of a turn of {role} is of type {kind!r}, and only text and images can be trained on"
            )
    return kept if any(map(is_image_part, kept)) else "".join(part["text"] for part in kept)


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call that names a function."""
    call = {key: value for key, value in call.items() if value is not None}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call names no function: {json.dumps(call)[:80]}")
    return call


def _parse_function_call(value: Any) -> list[Any]:
    """The calls of ShareGPT's `function_call` turns and of OpenAI's former key: one function, or a list of them."""
    calls = _parse_json(value)
    calls = [calls] if isinstance(calls, dict) else calls
    if not (isinstance(calls, list) and calls and all(isinstance(call, dict) for call in calls)):
        raise ValueError(f"a function_call is {value!r:.60}, expected JSON with the function's name and arguments")
    return [call if "function" in call else {"type": "function", "function": call} for call in calls]


def _parse_json(value: Any) -> Any:
    """Parses JSON text; returns anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError:
        return value
