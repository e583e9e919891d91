"""What is to be written: conversations whose replies are missing, from files of prompts or from nothing.

A script is what remains of a conversation: messages that are given, and roles whose turns are to be written.

Worked example, a prompt with a tool: the replies that it holds are left out, all else is kept.

    system, user, assistant (a call), tool, assistant, user, assistant
    system, user, write assistant,    tool, write assistant, user, write assistant
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.data.conversations import Place
from training.data.layouts import AUTO, Messages, RecordFormat, parse_record
from training.data.records import drop_nulls, read_records
from training.synthesis.turn_template import Role

# Whom the assistant answers.
_ASKING = ("user", "tool")
_SHAREGPT_NAMES = {"user": "human", "assistant": "gpt"}
# What a turn may have beside role and content (`training.data.layouts`): the same in every layout.
_EXTRAS = ("reasoning_content", "tool_calls", "tool_call_id", "name")


@dataclass
class Conversation:
    """One that is being written.

    Attributes:
        id: its name, which its seeds are made of.
        source: where its prompt comes from.
        script: what is still to come: given messages, and roles to be written.
        messages: what there is.
        turn_tokens: how many tokens each written turn has.
        problem: why it ended before its script did; "" when it did not.
        tools: JSON schemas of what the assistant may call.
    """

    id: str
    source: str
    script: deque[dict[str, Any] | Role]
    messages: Messages = field(default_factory=list)
    turn_tokens: list[int] = field(default_factory=list)
    problem: str = ""
    tools: list[dict[str, Any]] | None = None

    def next_role(self) -> Role | None:
        """Whose turn is to be written now, behind the given messages; None at the end."""
        while self.script and not isinstance(self.script[0], str):
            self.messages.append(self.script.popleft())  # type: ignore[arg-type]
        return self.script.popleft() if self.script else None  # type: ignore[return-value]

    def messages_before_reply(self) -> Messages:
        """Given messages up to the first turn that is to be written."""
        return list(itertools.takewhile(lambda step: not isinstance(step, str), self.script))  # type: ignore[arg-type]

    def add_turn(self, role: Role, text: str, num_tokens: int, thoughts: str = "") -> None:
        self.messages.append({"role": role, "content": text} | ({"reasoning_content": thoughts} if thoughts else {}))
        self.turn_tokens.append(num_tokens)

    def end(self, problem: str) -> None:
        """Ends here; what waits for a reply is taken back."""
        self.problem = problem
        self.script.clear()
        while self.messages and self.messages[-1]["role"] != "assistant":
            self.messages.pop()

    @property
    def is_of_use(self) -> bool:
        """Whether there is a reply to learn from."""
        return any(message["role"] == "assistant" for message in self.messages)

    def to_row(self, layout: str) -> dict[str, Any]:
        """A line of the output: `messages`, or ShareGPT's `conversations`."""
        row: dict[str, Any] = {"id": self.id, "source": self.source}
        if layout == "messages":
            row["messages"] = self.messages
        else:
            row["conversations"] = [
                {
                    "from": _SHAREGPT_NAMES.get(message["role"], message["role"]),
                    "value": message["content"],
                    **{name: message[name] for name in _EXTRAS if name in message},
                }
                for message in self.messages
            ]
        if self.tools:
            row["tools"] = self.tools
        row["turn_tokens"] = self.turn_tokens
        if self.problem:
            row["ended_by"] = self.problem
        return row


def plan_self_synthesis(count: int, *, seed: int, num_turns: int) -> list[Conversation]:
    """Conversations of which both sides are to be written."""
    script: list[dict[str, Any] | Role] = ["user", "assistant"]
    return [Conversation(f"self-{seed}-{number}", "self", deque(script * num_turns)) for number in range(count)]


def read_prompts(
    name: str | Path, *, split: str = "train", max_turns: int | None = None, record_format: RecordFormat = AUTO
) -> list[Conversation]:
    """Every conversation of a file, folder or hub id (`Place`), its replies to be written. Prompts that stand there
    twice are taken once.

    Raises:
        ValueError: a line that is no conversation, or has the id of another prompt; names file and line.
    """
    prompts: dict[str, tuple[Conversation, list[dict[str, Any] | Role]]] = {}
    place = Place.find(str(name), split, option="--prompts")
    for where, record in _read_place(place):
        try:
            parsed = _parse_prompt(record, record_format)
        except ValueError as error:
            raise ValueError(f"{where}: {error}. Mend it or leave it out") from error
        messages = parsed["messages"]
        script = list(_strip_replies(messages, max_turns))
        if "assistant" not in script:
            continue  # nobody asks anything
        identity = find_id(record, messages)
        source = str(record.get("source", Path(place.name).name))
        conversation = Conversation(identity, source, deque(script), tools=parsed.get("tools"))
        if prompts.setdefault(identity, (conversation, script))[1] != script:
            raise ValueError(
                f"{where}: another prompt above has the id {identity!r}, and a resumed run would take this one for "
                "done: give each an id of its own, or none"
            )
    if not prompts:
        raise ValueError(f"in --prompts {name} nobody asks anything: give conversations with user turns")
    return [conversation for conversation, _ in prompts.values()]


def choose_prompts(prompts: list[Conversation], count: int | None, *, seed: int) -> list[Conversation]:
    """So many of them, drawn at random but in their order; a larger count only adds some."""
    if count is None or count >= len(prompts):
        return prompts
    places = list(range(len(prompts)))
    random.Random(seed).shuffle(places)
    return [prompts[place] for place in sorted(places[:count])]


def find_id(record: dict[str, Any], messages: Messages) -> str:
    """The id that a record brings along, or a hash of its messages."""
    return str(record.get("id") or hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16])


def _read_place(place: Place) -> Iterator[tuple[str, Any]]:
    """(where it stands, record or the error) of every record."""
    for file in place.files:
        for number, record in read_records(file):
            yield f"{file}, line {number}", record
    if place.repository:
        for number, row in enumerate(place.load_repository(streaming=True), start=1):
            yield f"{place.label}, row {number}", drop_nulls(row)


def _parse_prompt(record: Any, record_format: RecordFormat) -> dict[str, Any]:
    """`messages`, and `tools` if there are any."""
    if isinstance(record, Exception):
        raise ValueError(str(record))
    turns = record.get("turns") if isinstance(record, dict) else None
    if isinstance(turns, list):
        record = {**record, "messages": [{"role": "user", "content": turn} for turn in turns]}
        record_format = AUTO
    return parse_record(record, record_format)


def _strip_replies(messages: Messages, max_turns: int | None) -> Iterator[dict[str, Any] | Role]:
    """Messages without the assistant's, which are to be written behind users and (the last of several) tools."""
    num_turns = 0
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        num_turns += message["role"] == "user"
        if max_turns is not None and num_turns > max_turns:
            return
        if message["role"] != "assistant":
            yield message
        is_answered = following is None or following["role"] != "tool"
        if message["role"] in _ASKING and is_answered:
            yield "assistant"
