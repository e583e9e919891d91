"""Where the turns of training conversations come from: the target itself here, or (`endpoint_replies`) a server.

A source is asked for turns and answers in its own time and order: a server is kept busy, and a decoder gets whole
batches. Each turn brings its own seed, so the order changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jinja2 import TemplateError

from training.data.layouts import Messages
from training.synthesis.reply_decoding import TurnDecoder
from training.synthesis.turn_template import Role, Tools, TurnTemplate

# Why a reply with marks of its own is of no use: in training the template would write another text in its place.
UNWRITABLE = "with thoughts or calls that the chat template does not write back"


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """A turn to be written.

    Attributes:
        messages: all that stands before it.
        role: whose turn it is.
        seed: of the sampling (`reply_decoding.turn_seed`).
        tools: JSON schemas of what the assistant may call.
    """

    messages: Messages
    role: Role
    seed: int
    tools: Tools = None


@dataclass(frozen=True)
class Reply:
    """A turn that was written.

    Attributes:
        text: without the token that ended it.
        num_tokens: with that token.
        problem: why it is of no use, "" if it is (see `reply_decoding.WrittenTurn`).
        thoughts: where they are known apart from the text; they count as tokens, too.
    """

    text: str
    num_tokens: int
    problem: str
    thoughts: str = ""


class ReplySource(Protocol):
    """Writes turns.

    Attributes:
        capacity: turns that it likes to have at a time; more may be asked for.
    """

    capacity: int

    def exchange(self, requests: Sequence[TurnRequest]) -> list[tuple[TurnRequest, Reply]]:
        """Takes further requests; returns what is written by now, at least one while anything is outstanding."""
        ...

    def take_effort(self) -> dict[str, float]:
        """What was spent since the last call, as numbers that add up: seconds, num_tokens and what else it counts."""
        ...

    def close(self) -> None:
        """Nothing more will be asked."""
        ...


def make_reply(template: TurnTemplate, request: TurnRequest, written: Reply, token_ids: Sequence[int]) -> Reply:
    """A reply as it is kept: with its thoughts apart where the chat template wants them so, and of no use where special
    tokens mark thoughts or calls in it that the template would write in another way.

    Args:
        written: with all that was found wrong with its tokens.
        token_ids: its text's.
    """
    problem = written.problem
    if request.role == "assistant" and problem in ("", "truncated") and template.has_marks(token_ids):
        parts = None if written.thoughts else template.split_reply(request.messages, written.text, request.tools)
        if parts is None:
            return replace(written, problem=f"{problem} in thoughts or a call" if problem else UNWRITABLE)
        written = replace(written, text=parts[0], thoughts=parts[1])
    return replace(written, problem=problem or ("" if written.text.strip() else "empty"))


class DecodedReplies:
    """Turns by the target itself: two batches at a time, so that rows of like length can be put together.

    Args:
        writer: decodes.
        stop_ids: the tokens that end a turn of each role (`TurnTemplate.find_stop_ids`).
    """

    def __init__(self, writer: TurnDecoder, template: TurnTemplate, stop_ids: Mapping[Role, set[int]]) -> None:
        self.writer, self.template, self.stop_ids = writer, template, stop_ids
        self.capacity = 2 * writer.batch_size
        self._effort: Counter[str] = Counter()

    def exchange(self, requests: Sequence[TurnRequest]) -> list[tuple[TurnRequest, Reply]]:
        start, cpu_start, before = time.perf_counter(), time.process_time(), self.writer.stats
        replies: list[tuple[TurnRequest, Reply]] = []
        for role in ("user", "assistant"):
            prompts: list[tuple[TurnRequest, list[int]]] = []
            for request in requests:
                if request.role == role:
                    try:
                        ids = self.template.encode_prompt(request.messages, request.role, request.tools)
                        prompts.append((request, ids))
                    except TemplateError as error:
                        replies.append((request, Reply("", 0, f"refused by the chat template ({error})")))
            turns = self.writer.write(
                [prompt for _, prompt in prompts],
                stop_ids=self.stop_ids[role],
                seeds=[request.seed for request, _ in prompts],
                marks=self.template.marks if role == "assistant" else (),
            )
            for (request, _), turn in zip(prompts, turns, strict=True):
                has_end = bool(turn.token_ids) and turn.token_ids[-1] in self.stop_ids[role]
                ids = turn.token_ids[: -1 if has_end else None]
                written = Reply(self.template.decode(ids), len(turn.token_ids), turn.problem)
                replies.append((request, make_reply(self.template, request, written, ids)))
        after = self.writer.stats
        self._effort.update(
            {
                "seconds": time.perf_counter() - start,
                "cpu_seconds": time.process_time() - cpu_start,
                "num_tokens": after.num_new_tokens - before.num_new_tokens,
                "num_verify_steps": after.num_verify_steps - before.num_verify_steps,
                "num_accepted": _num_accepted(after.accepted_histogram) - _num_accepted(before.accepted_histogram),
            }
        )
        return replies

    def take_effort(self) -> dict[str, float]:
        effort, self._effort = self._effort, Counter()
        return dict(effort)

    def close(self) -> None:
        pass


def _num_accepted(histogram: Sequence[int]) -> int:
    return sum(accepted * count for accepted, count in enumerate(histogram))


def describe_effort(efforts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Efforts of several processes added up: seconds of all of them together, tokens for each of these seconds, and the
    acceptance length where drafts were verified."""
    total = {name: sum(effort.get(name, 0) for effort in efforts) for name in sorted({*()}.union(*efforts))}
    described = {"process_seconds": round(total.pop("seconds", 0.0), 3), **total}
    if "cpu_seconds" in total:  # of all threads; where others use the machine as well, the fairer measure
        described["cpu_seconds"] = round(total["cpu_seconds"], 3)
    if described["process_seconds"]:
        described["tokens_per_process_second"] = round(total.get("num_tokens", 0) / described["process_seconds"], 2)
    if total.get("num_verify_steps"):
        described["acceptance_length"] = round(1 + total["num_accepted"] / total["num_verify_steps"], 4)
    return described
