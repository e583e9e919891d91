"""Plans the conversations to write: prompts of files without their replies, or both sides of new conversations.

The script of a conversation is the rest of it: given messages, and roles whose turns are to be written.

Worked example, a prompt with a tool: its replies are left out, everything else is kept.

    system, user, assistant (a call), tool, assistant, user, assistant
    system, user, write assistant,    tool, write assistant, user, write assistant
"""

import hashlib
import json
import logging
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.inference.request.chat_template import ConversationError, encode_prompt
from draftsmith.training.data.conversations import Place, iterate_place
from draftsmith.training.data.layouts import AUTO, IS_WANTED, LAYOUTS, LEARNS, Messages, RecordFormat, parse_record
from draftsmith.training.synthesis.turn_template import Role

logger = logging.getLogger(__name__)

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # SPEED-Bench publishes many turns like that
_LONE = ("prompt", "question")  # columns of a prompt that may stand without a reply
# The roles that the assistant answers.
_ASKING = ("user", "tool")


@dataclass
class Conversation:
    """A conversation that is being written.

    Attributes:
        id: its name, from which its seeds are made.
        source: the origin of its prompt.
        question_id, category: of a benchmark's question, or "".
        script: the rest: given messages, and roles whose turns are to be written.
        turn_tokens: the number of tokens of each written turn.
        problem: why it ended before its script, or "".
    """

    id: str
    source: str
    script: deque[dict[str, Any] | Role]
    messages: Messages = field(default_factory=list)
    turn_tokens: list[int] = field(default_factory=list)
    problem: str = ""
    tools: list[dict[str, Any]] | None = None
    question_id: str = ""
    category: str = ""

    def next_role(self) -> Role | None:
        """Appends given messages; returns the role whose turn is to be written next, None at the end."""
        while self.script and not isinstance(self.script[0], str):
            self.messages.append(self.script.popleft())  # type: ignore[arg-type]
        return self.script.popleft() if self.script else None  # type: ignore[return-value]

    def given_turns(self) -> list[Messages]:
        """Returns the given messages before each turn that is still to be written."""
        turns: list[Messages] = [[]]
        for step in self.script:
            if isinstance(step, str):
                turns.append([])
            else:
                turns[-1].append(step)
        return turns[:-1]

    def encode_prompt(self, tokenizer: Any) -> list[int]:
        """Returns the token ids of everything before the first turn to write, or without a template of its last text.

        Raises:
            ConversationError: the chat template rejects it.
        """
        messages = self.given_turns()[0]
        if tokenizer.chat_template:
            return encode_prompt(tokenizer, messages, tools=self.tools)
        return list(tokenizer(messages[-1]["content"])["input_ids"])

    def add_turn(self, role: Role, text: str, num_tokens: int, thoughts: str = "", *, is_cut: bool = False) -> None:
        more = {"reasoning_content": thoughts} if thoughts else {}
        self.messages.append({"role": role, "content": text, **more, **({"truncated": True} if is_cut else {})})
        self.turn_tokens.append(num_tokens)

    def end(self, problem: str) -> None:
        """Ends the conversation after its last reply."""
        self.problem = problem
        self.script.clear()
        while self.messages and self.messages[-1]["role"] != "assistant":
            self.messages.pop()

    @property
    def is_of_use(self) -> bool:
        """Whether it has a reply to learn from."""
        return any(message["role"] == "assistant" for message in self.messages)

    def to_row(self) -> dict[str, Any]:
        """Returns a line of the output."""
        row: dict[str, Any] = {"id": self.id, "source": self.source, "messages": self.messages}
        if self.tools:
            row["tools"] = self.tools
        row["turn_tokens"] = self.turn_tokens
        if self.problem:
            row["ended_by"] = self.problem
        return row


def plan_self_synthesis(count: int, *, seed: int, num_turns: int) -> list[Conversation]:
    """Returns conversations in which both sides are to be written."""
    script: list[dict[str, Any] | Role] = ["user", "assistant"]
    return [Conversation(f"self-{seed}-{number}", "self", deque(script * num_turns)) for number in range(count)]


def read_prompts(
    name: str | Path,
    *,
    split: str = "train",
    max_turns: int | None = None,
    record_format: RecordFormat = AUTO,
    option: str = "--prompts",
) -> list[Conversation]:
    """Returns each conversation of a file, folder or hub id (`Place`) once, with its replies to be written.

    Args:
        option: the option that gave `name`, for messages.

    Raises:
        ValueError: a line that is not a conversation, or has the id of another prompt; names file and line.
    """
    prompts: dict[str, tuple[Conversation, list[dict[str, Any] | Role]]] = {}
    notes: Counter[str] = Counter()
    place = Place.find(str(name), split, option=option)
    for where, record in iterate_place(place):
        try:
            parsed = _parse_prompt(record, record_format)
        except ValueError as error:
            raise ValueError(f"{where}: {error}. Correct it or leave it out") from error
        messages = parsed["messages"]
        notes.update([parsed["note"]] if "note" in parsed else [])
        script = list(_strip_replies(messages, max_turns))
        if "assistant" not in script:
            continue  # there is nothing to answer
        identity = record.get("id")
        if identity in (None, ""):
            identity = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
        identity = str(identity)
        source = str(record.get("source", Path(place.name).name))
        conversation = Conversation(identity, source, deque(script), tools=parsed.get("tools"))
        conversation.question_id, conversation.category = (
            "" if record.get(column) is None else str(record[column]) for column in ("question_id", "category")
        )
        if prompts.setdefault(identity, (conversation, script))[1] != script:
            raise ValueError(
                f"{where}: an earlier prompt has the id {identity!r} too, so a resumed run would skip this one: give "
                "each prompt its own id, or none"
            )
    for note, count in notes.items():
        logger.warning("%s: %d %s", name, count, note)
    if not prompts:
        raise ValueError(f"{option} {name} has nothing to answer: give conversations with user turns")
    return [conversation for conversation, _ in prompts.values()]


def encode_prompts(
    conversations: Iterable[Conversation], tokenizer: Any, rejected: list[str]
) -> Iterator[tuple[Conversation, list[int]]]:
    """Yields each conversation with the token ids of its prompt.

    Args:
        rejected: the names of conversations that the chat template rejects are appended, each with the reason.
    """
    for conversation in conversations:
        try:
            yield conversation, conversation.encode_prompt(tokenizer)
        except ConversationError as error:
            rejected.append(f"the prompt {conversation.id}: {error}")


def report_rejected(name: str | Path, rejected: list[str], *, num_left: int) -> None:
    """Warns of the prompts of `encode_prompts` that are left out.

    Raises:
        ValueError: none is left.
    """
    if rejected and not num_left:
        raise ValueError(f"{name}: {rejected[0]}; no prompt is left ({len(rejected)} are rejected): give others")
    if rejected:
        logger.warning("%s: left out %d prompts; the first: %s", name, len(rejected), rejected[0])


def choose_prompts(prompts: list[Conversation], count: int | None, *, seed: int) -> list[Conversation]:
    """Draws `count` prompts and keeps their order; a larger count only adds prompts."""
    if count is None or count >= len(prompts):
        return prompts
    places = list(range(len(prompts)))
    random.Random(seed).shuffle(places)
    return [prompts[place] for place in sorted(places[:count])]


def _parse_prompt(record: Any, record_format: RecordFormat) -> dict[str, Any]:
    """Returns `messages`, and `tools` if there are any."""
    if isinstance(record, Exception):
        raise ValueError(str(record))
    if isinstance(record, dict):  # replies are written anew, so it does not matter whether one is to be learned
        record = {column: _drop_learning(value) for column, value in record.items() if column not in IS_WANTED}
        if isinstance(turns := record.get("turns"), list):
            record["messages"] = [{"role": "user", "content": turn} for turn in turns]
            record_format = AUTO
        elif not record_format.columns and _is_lone(record):
            record["response"] = ""
    parsed = parse_record(record, record_format)
    if "media" in parsed:
        raise ValueError("the prompt has images, and prompts of text only are decoded here")
    if any(str(message["content"]).startswith(PLACEHOLDER) for message in parsed["messages"]):
        raise ValueError(
            "a turn is a placeholder: fetch the texts of SPEED-Bench with NeMo-Skills' or ModelOpt's program for it"
        )
    return parsed


def _is_lone(record: dict[str, Any]) -> bool:
    """Whether a record is a prompt without a reply."""
    given = {column for column, value in record.items() if value is not None}
    has_layout = any(given >= set(layout.required) for layout in LAYOUTS.values())
    is_whole = not any(record.get(column) for column in ("context", "input"))  # which the prompt would lose
    return is_whole and not has_layout and any(isinstance(record.get(column), str) for column in _LONE)


def _drop_learning(turns: Any) -> Any:
    """The turns of a column without the keys that say whether they are learned; any other column as it is."""
    if not isinstance(turns, list):
        return turns
    return [{key: turn[key] for key in turn if key not in LEARNS} if isinstance(turn, dict) else turn for turn in turns]


def _strip_replies(messages: Messages, max_turns: int | None) -> Iterator[dict[str, Any] | Role]:
    """Replaces the assistant's messages by its role, after each user message and the last of several tool results."""
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
