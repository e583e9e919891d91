"""Scheduler: continuous batching. One thread owns the decoders, and serves replies of all requests in rounds.

A round drops the replies that nobody waits for, reads prompts for as many tokens as one chunk has, and makes one step
of every lane. A lane is the replies of one drafter (`Lane`): replies of any sampling options share its passes, but
plain decoding and other drafters have passes of their own. Lanes take turns, step by step. Waiting replies start in the
order of their arrival; a reply whose lane is full lets those of other lanes pass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.prefix_cache import PREFILL_CHUNK
from draftsmith.inference.serving.lane import Lane
from draftsmith.inference.serving.metrics import Metrics
from draftsmith.inference.serving.reply import Reply
from draftsmith.inference.targets.target import Target

logger = logging.getLogger(__name__)

PLAIN = "none"  # the drafter's name of plain decoding
INTERNAL_ERROR = "internal error: see the server's log"
IDLE_SECONDS = 0.5  # how often an idle engine looks whether it is to stop


class QueueFullError(Exception):
    """Too many replies wait. `retry_seconds` is about how long until some have started."""

    def __init__(self, retry_seconds: int) -> None:
        super().__init__("the server's queue is full")
        self.retry_seconds = retry_seconds


class StoppingError(Exception):
    """The server takes no more requests."""


@dataclass(frozen=True)
class Limits:
    """What a server holds at once.

    Attributes:
        max_rows: running replies of one lane.
        max_length: tokens of a reply, prompt included.
        max_waiting: replies that wait for a row.
    """

    max_rows: int = 8
    max_length: int = 2048
    max_waiting: int = 64


class Scheduler:
    """Decodes replies in a thread of its own.

    Args:
        drafters: by name, the default one first; None = plain decoding.
        tree: of all drafters, as in `Decoder`.
        limits: decided here, because caches are allocated once.

    Raises:
        ValueError: a target or drafter that cannot be served, or a bad tree.
    """

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter | None],
        *,
        tree: str | None = None,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        if target.is_encoder_decoder:
            raise ValueError(f"{type(target.model).__name__} reads sources; the server is for decoder-only targets")
        target.refuse_recurrent(
            "replies cannot join a running batch", "decode with generate, or serve with vLLM or SGLang"
        )
        self.target, self.drafters, self.tree = target, dict(drafters), tree
        self.limits, self.metrics = limits or Limits(), metrics or Metrics()
        self._lanes: dict[str, Lane] = {}
        self._waiting: deque[tuple[Reply, str]] = deque()
        self._replies: list[Reply] = []  # submitted and not yet counted as ended
        self._reading: tuple[Reply, str, Generator[int]] | None = None
        self._changed = threading.Condition()
        self._deadline: float | None = None  # set while stopping
        self._mean_seconds = 1.0  # of replies
        for name in self.drafters:  # what cannot be served shows now
            self._open_lane(name)
        self._thread = threading.Thread(target=self._run, name="draftsmith-engine", daemon=True)

    @property
    def num_bytes(self) -> int:
        """The most bytes of the target's keys and values, in all lanes together."""
        return sum(lane.num_bytes for lane in self._lanes.values())

    @property
    def num_replies(self) -> int:
        """Rows that have been submitted and have not ended."""
        return len(self._replies)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, replies: Sequence[Reply], drafter: str) -> None:
        """Queues the replies of one request, for the drafter of this name. For any thread.

        Raises:
            QueueFullError: they do not all fit.
            StoppingError: the server is about to end.
        """
        with self._changed:
            if self._deadline is not None or not self.is_running:
                raise StoppingError("the server is shutting down")
            if len(self._waiting) + len(replies) > self.limits.max_waiting:
                num_turns = 1 + len(self._waiting) // self.limits.max_rows
                raise QueueFullError(min(60, max(1, round(self._mean_seconds * num_turns))))
            self._waiting.extend((reply, drafter) for reply in replies)
            self._replies.extend(replies)
            self._changed.notify_all()

    def stop(self, seconds: float) -> None:
        """Takes no more replies, and ends those that are not finished after so many seconds. For any thread."""
        with self._changed:
            self._deadline = time.perf_counter() + seconds
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._wait_for_rows():
                with self.target.without_autograd():
                    self._round()
        finally:
            with self._changed:
                self._deadline = self._deadline or 0.0
                for reply in self._replies:
                    reply.fail("the server is shutting down")
                self._count_ended()

    def _wait_for_rows(self) -> bool:
        """Whether there is something to do; False when the thread is to end."""
        with self._changed:
            while not self._replies and self._deadline is None:
                self._changed.wait(IDLE_SECONDS)
            if self._deadline is None:
                return True
            return bool(self._replies) and time.perf_counter() < self._deadline

    def _round(self) -> None:
        self._drop_cancelled()
        self._read_prompts()
        for name, lane in list(self._lanes.items()):
            if lane.replies:
                self._guard(name, lane.advance)
        self._count_ended()

    def _drop_cancelled(self) -> None:
        for reply in list(self._replies):
            if reply.is_cancelled:
                reply.fail("cancelled")
        if self._reading is not None and self._reading[0].is_over:
            self._stop_reading()
        with self._changed:
            self._waiting = deque(each for each in self._waiting if not each[0].is_over)
        for name, lane in list(self._lanes.items()):
            if lane.replies:
                self._guard(name, lane.drop_replies)

    def _read_prompts(self) -> None:
        """Reads for as many tokens as a chunk has; replies whose prompts end join."""
        left = PREFILL_CHUNK
        while left > 0:
            self._reading = self._reading or self._start_next()
            if self._reading is None:
                return
            _, name, chunks = self._reading
            size = self._guard(name, partial(next, chunks, None))
            left -= size or 0
            if size is None:
                self._reading = None

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading[2].close()
            self._reading = None

    def _start_next(self) -> tuple[Reply, str, Generator[int]] | None:
        """The first waiting reply whose lane has room."""
        with self._changed:
            for each in self._waiting:
                reply, name = each
                if len(self._lanes[name].replies) < self.limits.max_rows:
                    self._waiting.remove(each)
                    return reply, name, self._lanes[name].join(reply)
        return None

    def _open_lane(self, name: str) -> None:
        drafter = self.drafters[name]
        decoder = Decoder(self.target, drafter, tree=self.tree if drafter is not None else None)
        self._lanes[name] = Lane(decoder, max_rows=self.limits.max_rows, max_length=self.limits.max_length)

    def _guard(self, name: str, function: Callable[[], int | None]) -> int | None:
        """Runs a part of a round. If it fails, the lane's replies end with an error, and the lane is made anew."""
        try:
            return function()
        except Exception:  # a server outlives what a request can bring about
            replies = self._lanes.pop(name).replies[:]
            if self._reading is not None and self._reading[1] == name:
                replies.append(self._reading[0])
                self._stop_reading()
            logger.exception("a step failed, and %d replies end with an error", len(replies))
            for reply in replies:
                reply.fail(INTERNAL_ERROR)
            self._open_lane(name)
            return None

    def _count_ended(self) -> None:
        with self._changed:
            ended = [reply for reply in self._replies if reply.is_over]
            self._replies = [reply for reply in self._replies if not reply.is_over]
            self.metrics.waiting.set(len(self._waiting))
        for reply in ended:
            self.metrics.count_reply(reply)
            if reply.started is not None and reply.ended is not None:
                self._mean_seconds += 0.1 * (reply.ended - reply.started - self._mean_seconds)
        num_running = sum(len(lane.replies) for lane in self._lanes.values())
        self.metrics.running.set(num_running + (self._reading is not None))
        self.metrics.cache_rows.set(num_running)
