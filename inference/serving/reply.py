"""Reply: one row of a served batch, from its tokens to pieces of text.

A request with n > 1 has n replies. The engine's thread owns a reply from the moment it is submitted; only `cancel` is
for other threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from draftsmith.inference.request.request import Request
from draftsmith.inference.serving.errors import RequestError
from draftsmith.inference.stats import GenerationStats
from draftsmith.inference.streaming.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class ReplyToken:
    """One emitted token.

    Attributes:
        text: what the token added to the text; "" within a character of several tokens, and at the end of a text.
        depth: 0 = the target's own token, d = a draft accepted at depth d of its tree.
        probability: the drafter's probability of an accepted draft, if its tree has it.
        logprob: the target's log-probability of the token, before logits processors; None if not asked for.
        top: the likeliest tokens with theirs.
    """

    id: int
    text: str
    depth: int
    probability: float | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class DraftedStep(NamedTuple):
    """A step with a draft: the depth of the row's tree, its nodes without the root, how many of them were accepted."""

    depth: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True)
class Piece:
    """What a step adds to a reply.

    Attributes:
        text: it may lag behind the tokens, while it could be the beginning of a stop string.
        finish_reason: "stop" or "length" in the last piece.
        error: why the reply ended without being finished; then it is the last piece.
    """

    text: str = ""
    tokens: tuple[ReplyToken, ...] = ()
    finish_reason: str | None = None
    error: RequestError | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class StopStrings:
    """Cuts a text at the first of some strings, which may arrive in pieces.

    >>> stops = StopStrings(["END"])
    >>> [stops.add(piece) for piece in ("one E", "N", "D two")]
    ['one ', '', '']
    >>> stops.is_found
    True
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.is_found = False
        self._held = ""

    def add(self, text: str, *, may_end: bool = True) -> str:
        """The text that is certain not to belong to a stop string.

        Args:
            may_end: strings that end in this text count.
        """
        if not self.strings:
            return text
        text = self._held + text
        places = [place for string in self.strings if (place := text.find(string)) >= 0]
        if places and may_end:
            self.is_found, self._held = True, ""
            return text[: min(places)]
        held = max(_count_begun(text, string) for string in self.strings)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The text that was held back, at the end."""
        held, self._held = self._held, ""
        return held


def _count_begun(text: str, string: str) -> int:
    """The length of the longest end of `text` with which `string` begins."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)


@dataclass(eq=False)
class Reply:
    """One reply.

    Args:
        request: of one row.
        row_seed: [1] long.
        num_top: how many of the likeliest tokens are reported; None = no log-probabilities.
        min_tokens: stop strings among the first so many tokens do not end the text.
        may_learn: whether the server's learner may see the text.
        on_piece: called in the engine's thread.
        on_end: called there before the last piece, so that who has read it finds the reply counted.

    Attributes:
        row: the request's, which tells the reply its tokens and asks it for the end.
        end_reason: "stop", "length", "abort" (cancelled) or "error"; "" before.
        stats: counts its verify steps, and the nodes drafted for them.
        drafts: the steps with a draft, in their order.
        added: what each token of the present step added to the text.
        arrived, started, first_token, ended: `time.perf_counter()` of these moments; None before. A reply starts when
            its prompt is about to be read.
    """

    request: Request
    row_seed: Tensor
    detokenizer: IncrementalDetokenizer
    stops: StopStrings
    num_top: int | None = None
    min_tokens: int = 0
    may_learn: bool = True
    on_piece: Callable[[Piece], None] = lambda _: None
    on_end: Callable[[Reply], None] = lambda _: None
    stats: GenerationStats = field(default_factory=GenerationStats)
    arrived: float = field(default_factory=time.perf_counter)
    drafts: list[DraftedStep] = field(default_factory=list)
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    end_reason: str = ""
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        (self.row,) = self.request.rows
        self.row.on_token, self.row.is_end = self._read, lambda _: self.stops.is_found
        self.added: list[str] = []
        self._shown: list[str] = []  # the part of `added` that is certain not to belong to a stop string

    @property
    def prompt(self) -> list[int]:
        return self.row.prompt

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    def cancel(self) -> None:
        """Nobody waits for the reply: it ends before the engine's next step. For any thread."""
        self.is_cancelled = True

    def _read(self, token: int) -> None:
        """Turns a token that the row keeps into text."""
        added = "" if token in self.row.end_ids else self.detokenizer.add(token)
        self.added.append(added)
        self._shown.append(self.stops.add(added, may_end=len(self.row.new) > self.min_tokens))

    def publish(self, tokens: Sequence[ReplyToken]) -> None:
        """Hands on the tokens that the row has kept of a step, or of its prompt."""
        if self.is_over:
            return
        self.first_token = self.first_token or time.perf_counter()
        if self.row.error is not None:
            self.fail(self.row.error)
            return
        texts, self.added, self._shown = self._shown, [], []
        reason = None
        if self.row.is_finished:
            if not self.stops.is_found:
                texts.append(self.stops.add(self.detokenizer.flush()))
            if not self.stops.is_found:
                texts.append(self.stops.flush())
            reason = "stop" if self.stops.is_found or self.row.new[-1] in self.row.end_ids else "length"
            self._end(reason)
        self.on_piece(Piece("".join(texts), tuple(tokens), reason))

    def fail(self, error: str, *, status: int = 500) -> None:
        """Ends the reply unfinished."""
        if not self.is_over:
            self.row.states = None
            self.row.end()
            self._end("abort" if self.is_cancelled else "error")
            self.on_piece(Piece(error=RequestError(error, status=status)))

    def _end(self, reason: str) -> None:
        self.end_reason, self.ended = reason, time.perf_counter()
        self.on_end(self)
