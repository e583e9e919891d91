"""The sources of written turns: the target on this machine, or a server (`endpoint_replies`).

A source answers requests in its own time and order, so that a server is kept busy and a decoder gets whole batches.
Each turn has its own seed, so the order does not change the text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from draftsmith.inference import Decoder, GenerationStats
from draftsmith.inference.request.chat_template import ConversationError, Tools
from draftsmith.training.data.layouts import Messages
from draftsmith.training.synthesis.reply_decoding import TurnSettings, find_problem, write_turns
from draftsmith.training.synthesis.turn_template import Role, TurnTemplate

NUM_BATCHES = 8  # that wait at a time

# The problem of a reply with marks that the chat template would write differently in training.
UNWRITABLE = "with thoughts or calls that the chat template does not write back"


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """A turn to write: by `role`, after `messages`, drawn with `seed` (`reply_decoding.turn_seed`)."""

    messages: Messages
    role: Role
    seed: int
    tools: Tools = None


@dataclass(frozen=True)
class Reply:
    """A written turn.

    Attributes:
        text: without the token that ended it, and without `thoughts` that are separate.
        num_tokens: with that token, and with the thoughts.
        problem: why it is useless, or "" (`reply_decoding.find_problem`; "prompt too long"; `make_reply`).
    """

    text: str
    num_tokens: int
    problem: str
    thoughts: str = ""


class ReplySource(Protocol):
    """Writes turns.

    Attributes:
        capacity: the number of requests to keep outstanding (more are allowed).
        stats: tokens so far, and verify steps where the target decodes here.
    """

    capacity: int
    stats: GenerationStats

    def exchange(self, requests: Sequence[TurnRequest]) -> list[tuple[TurnRequest, Reply]]:
        """Takes further requests; returns finished ones, at least one if any is outstanding."""
        ...

    def close(self) -> None:
        """Ends the source: no request follows."""
        ...


def make_reply(template: TurnTemplate, request: TurnRequest, written: Reply, token_ids: Sequence[int]) -> Reply:
    """Separates the thoughts of a reply as the chat template needs it; `token_ids` are those of its text.

    A reply whose marked thoughts or calls the template would write differently is useless.
    """
    problem = written.problem
    if problem == "truncated":  # perhaps within a character
        written = replace(written, text=written.text.rstrip("\ufffd"))
    if request.role == "assistant" and problem in ("", "truncated") and template.has_marks(token_ids):
        parts = None if written.thoughts else template.split_reply(request.messages, written.text, request.tools)
        if parts is None:
            return replace(written, problem=f"{problem} in thoughts or a call" if problem else UNWRITABLE)
        written = replace(written, text=parts[0], thoughts=parts[1])
    return replace(written, problem=problem or ("" if written.text.strip() else "empty"))


class DecodedReplies:
    """Lets the target write turns, a batch at a time. Many requests wait, so that the rows of a batch are of similar
    lengths: each row is padded to the longest. The longest conversation goes first, so that it ends soon.

    `stop_ids` are the tokens that end a turn of each role (`TurnTemplate.find_stop_ids`).

    Raises:
        ValueError: the target has no positions left for any prompt.
    """

    def __init__(
        self,
        decoder: Decoder,
        template: TurnTemplate,
        stop_ids: Mapping[Role, set[int]],
        settings: TurnSettings,
        *,
        batch_size: int = 32,
    ) -> None:
        limit = decoder.target.max_length
        if limit is not None and limit <= settings.max_new_tokens:
            raise ValueError(
                f"max_new_tokens is {settings.max_new_tokens}, but the target has {limit} positions "
                f"({decoder.target.length_limit_reason}): give less"
            )
        self.decoder, self.template, self.stop_ids, self.settings = decoder, template, stop_ids, settings
        self.batch_size, self.capacity = batch_size, NUM_BATCHES * batch_size
        self.max_prompt_tokens = math.inf if limit is None else limit - settings.max_new_tokens
        self.stats = GenerationStats()
        self._waiting: dict[TurnRequest, list[int]] = {}  # the prompts, the oldest first

    def exchange(self, requests: Sequence[TurnRequest]) -> list[tuple[TurnRequest, Reply]]:
        replies: list[tuple[TurnRequest, Reply]] = []
        for request in requests:
            try:
                prompt = self.template.encode_prompt(request.messages, request.role, request.tools)
            except ConversationError as error:
                replies.append((request, Reply("", 0, f"rejected by the chat template ({error.kind})")))
                continue
            if len(prompt) > self.max_prompt_tokens:
                replies.append((request, Reply("", 0, "prompt too long")))
            else:
                self._waiting[request] = prompt
        if not self._waiting:
            return replies
        first = max(self._waiting, key=lambda request: len(request.messages))  # of several, the oldest
        length = len(self._waiting[first])
        alike = [request for request in self._waiting if request.role == first.role]
        alike.sort(key=lambda request: abs(len(self._waiting[request]) - length))
        batch, stop_ids = alike[: self.batch_size], self.stop_ids[first.role]
        prompts = [self._waiting.pop(request) for request in batch]
        seeds, tokenizer = [request.seed for request in batch], self.template.tokenizer
        turns, stats = write_turns(
            self.decoder, self.settings, prompts, stop_ids=stop_ids, seeds=seeds, tokenizer=tokenizer
        )
        self.stats += stats
        marks = self.template.marks if first.role == "assistant" else ()
        for request, token_ids in zip(batch, turns, strict=True):
            problem = find_problem(token_ids, stop_ids, self.template.special_ids, marks)
            ids = token_ids[: -1 if token_ids[-1] in stop_ids else None]
            written = Reply(self.template.decode(ids), len(token_ids), problem)
            replies.append((request, make_reply(self.template, request, written, ids)))
        return replies

    def close(self) -> None:
        pass
