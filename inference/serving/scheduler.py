"""Scheduler: continuous batching. One thread owns the decoders, and serves replies of all requests in rounds.

A round drops the replies that nobody waits for, reads prompts for as many tokens as one chunk has, and makes one step
of every lane. A lane is the replies of one drafter and tree (`Lane`): replies of any sampling options share its passes,
but plain decoding and other drafters or trees have passes of their own. Lanes take turns, step by step. Waiting replies
start in the order of their arrival; a reply whose lane is full lets those of other lanes pass. A reply for which there
is no lane lets them pass for some seconds, and then waits for the first lane that is idle.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafters.base import PREFILL_CHUNK, Drafter
from draftsmith.inference.learning import Learner
from draftsmith.inference.openmp import release_workers
from draftsmith.inference.serving.errors import RequestError
from draftsmith.inference.serving.lane import Lane
from draftsmith.inference.serving.metrics import Metrics
from draftsmith.inference.serving.reply import Reply
from draftsmith.inference.targets.target import Target

logger = logging.getLogger(__name__)

LaneName = tuple[str, str | None]
"""The name of the drafter ("none" = plain decoding), and the tree as text (None = the default)."""

PLAIN = "none"
INTERNAL_ERROR = "internal error: see the server's log"
SHUTTING_DOWN = "the server is shutting down"
PATIENCE_SECONDS = 5.0  # how long replies of other lanes may pass a reply for which there is no lane


@dataclass(frozen=True)
class Limits:
    """What a server holds at once.

    Attributes:
        max_rows: running replies of one lane.
        max_length: tokens of a reply, prompt included.
        max_waiting: replies that wait for a lane.
        max_lanes: pairs of drafter and tree with running replies.
    """

    max_rows: int = 8
    max_length: int = 2048
    max_waiting: int = 64
    max_lanes: int = 2


class Scheduler:
    """Decodes replies in a thread of its own.

    Args:
        drafters: by name, the default one first. Plain decoding is the last one, "none".
        tree: of lanes whose requests name no tree, as in `Decoder`.
        limits: decided here, because caches are allocated once.
        learner: improves the default drafter with the replies.

    Raises:
        ValueError: a target or drafter that cannot be served, or a bad tree.
    """

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        *,
        tree: str | None = None,
        limits: Limits,
        learner: Learner | None = None,
    ) -> None:
        if target.is_encoder_decoder:
            raise ValueError(f"{type(target.model).__name__} reads sources; the server is for decoder-only targets")
        target.refuse_recurrent(
            "replies cannot join a running batch", "decode with generate, or serve with vLLM or SGLang"
        )
        if PLAIN in drafters:
            raise ValueError(f"heads are called {PLAIN!r}, which means plain decoding: rename their folder")
        self.target, self.tree = target, tree
        self.drafters: dict[str, Drafter | None] = {**drafters, PLAIN: None}
        self.limits, self.metrics = limits, Metrics()
        self.default_name, self.learner = next(iter(self.drafters)), learner
        if learner is not None:
            self.metrics.watch_learning(lambda: learner.progress)
        self._lanes: dict[LaneName, Lane] = {}
        self._waiting: deque[tuple[Reply, LaneName]] = deque()
        self._replies: list[Reply] = []  # submitted, and some of the present round's that have ended
        self._reading: tuple[Reply, LaneName, Generator[int]] | None = None
        self._changed = threading.Condition()
        self._deadline: float | None = None  # set while stopping
        # All drafters, the default one last: what cannot be served shows now.
        for name, drafter in reversed(self.drafters.items()):
            if drafter is not None or name == self.default_name:
                self._find_lane((name, None))
        self.metrics.expect_positions(max(lane.step.path_width for lane in self._lanes.values()) - 1)
        self._thread = threading.Thread(target=self._run, name="draftsmith-engine", daemon=True)

    @property
    def num_bytes(self) -> int:
        """The most bytes of the target's keys and values, in all lanes together."""
        return self.limits.max_lanes * max(lane.num_bytes for lane in self._lanes.values())

    @property
    def is_running(self) -> bool:
        """Whether it takes replies."""
        return self._deadline is None and self.has_thread

    @property
    def has_thread(self) -> bool:
        """Whether replies may still run."""
        return self._thread.is_alive()

    def start(self) -> None:
        release_workers()  # those that loaded the target
        self._thread.start()

    def submit(self, replies: Sequence[Reply], lane: LaneName) -> None:
        """Queues the replies of one request. For any thread.

        Raises:
            RequestError: they do not all fit, or the server is about to end.
        """
        with self._changed:
            if not self.is_running:
                raise RequestError(SHUTTING_DOWN, status=503)
            if len(self._waiting) + len(replies) > self.limits.max_waiting + self._count_free(lane):
                raise RequestError("the server's queue is full: try again later", status=429)
            for reply in replies:
                reply.on_end = self.metrics.count_reply
            self._waiting.extend((reply, lane) for reply in replies)
            self._replies.extend(replies)
            self._changed.notify_all()

    def _count_free(self, name: LaneName) -> int:
        """Rows of a lane that no reply has; 0 of a lane that must wait until another one is idle."""
        lane, reading = self._lanes.get(name), self._reading
        if lane is None and len(self._lanes) >= self.limits.max_lanes:
            return self.limits.max_rows if any(not other.replies for other in [*self._lanes.values()]) else 0
        num_read = int(reading is not None and reading[1] == name)
        return max(0, self.limits.max_rows - (0 if lane is None else len(lane.replies)) - num_read)

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
                    reply.fail(SHUTTING_DOWN, status=503)
                self._forget_ended()

    def _wait_for_rows(self) -> bool:
        """Whether there is something to do; False when the thread is to end."""
        with self._changed:
            self._tell_learner(is_decoding=bool(self._replies))
            self._changed.wait_for(lambda: self._replies or self._deadline is not None)
            self._tell_learner(is_decoding=True)
            if self._deadline is None:
                return True
            return bool(self._replies) and time.perf_counter() < self._deadline

    def _tell_learner(self, *, is_decoding: bool) -> None:
        if self.learner is not None:
            self.learner.num_decoding = int(is_decoding)

    def _round(self) -> None:
        if self.learner is not None:
            self.learner.swap()
        self._drop_cancelled()
        self._read_prompts()
        for name, lane in list(self._lanes.items()):
            if lane.replies:
                self._guard(name, lane.advance)
        self._forget_ended()

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

    def _start_next(self) -> tuple[Reply, LaneName, Generator[int]] | None:
        """The first waiting reply whose lane has room."""
        with self._changed:
            waiting = list(self._waiting)
        for each in waiting:
            reply, name = each
            try:
                lane = self._find_lane(name)
            except Exception:  # such as too little memory
                logger.exception("no lane could be made for %s", name)
                reply.fail(INTERNAL_ERROR)
                lane = None
            if reply.is_over or (lane is not None and len(lane.replies) < lane.max_rows):
                with self._changed:
                    self._waiting.remove(each)
            if lane is not None and len(lane.replies) < lane.max_rows:
                return reply, name, lane.join(reply)
            if lane is None and time.perf_counter() - reply.arrived > PATIENCE_SECONDS:
                return None  # until a lane is idle
        return None

    def _find_lane(self, name: LaneName) -> Lane | None:
        """The lane of this name; a new one instead of the idle lane that was used longest ago; None while all run."""
        if name in self._lanes:
            return self._lanes[name]
        if len(self._lanes) >= self.limits.max_lanes:
            idle = [other for other, lane in self._lanes.items() if not lane.replies]
            if not idle:
                return None
            del self._lanes[min(idle, key=lambda other: self._lanes[other].last_used)]
        drafter, tree = self.drafters.get(name[0]), name[1] or self.tree
        learner = self.learner if name[0] == self.default_name else None
        decoder = Decoder(
            self.target,
            drafter,
            tree=tree if drafter is not None else None,
            batch_invariant=False,
            learner=learner,
        )
        lane = Lane(decoder, max_rows=self.limits.max_rows, max_length=self.limits.max_length)
        self._lanes[name] = lane
        return lane

    def _guard(self, name: LaneName, function: Callable[[], int | None]) -> int | None:
        """Runs a part of a round. If it fails, the lane's replies end with an error, and the lane is made anew."""
        try:
            return function()
        except Exception:  # a server outlives what a request can bring about
            lane = self._lanes.pop(name, None)
            replies = [*(lane.replies if lane is not None else [])]
            if self._reading is not None and self._reading[1] == name:
                replies.append(self._reading[0])
                self._stop_reading()
            logger.exception("a step failed, and %d replies end with an error", len(replies))
            for reply in replies:
                reply.fail(INTERNAL_ERROR)
            return None

    def _forget_ended(self) -> None:
        with self._changed:
            self._replies = [reply for reply in self._replies if not reply.is_over]
            self.metrics.waiting.set(len(self._waiting))
        num_running = sum(len(lane.replies) for lane in self._lanes.values())
        self.metrics.running.set(num_running + (self._reading is not None))
