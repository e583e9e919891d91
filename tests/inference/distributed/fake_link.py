"""A link to servers in the same process, which delivers answers late and in a random order. Each message goes through
its frame of bytes."""

import random
from collections.abc import Callable
from typing import Any

from draftsmith.inference.distributed.messages import Answer, Prompt, Task
from draftsmith.inference.distributed.wire import decode, encode


class FakeLink:
    """Args:
        make_server: makes each rank's server.
        most_delay: an answer comes after 0 to this many looks at the link; rank 0 looks once after each draft.

    Attributes:
        num_stale: answers that came after their round; num_overtaken: answers that overtook an older task's.
    """

    def __init__(self, make_server: Callable[[], Any], num_servers: int, *, seed: int = 0, most_delay: int = 8) -> None:
        self.ranks = tuple(range(1, num_servers + 1))
        self.servers = {rank: make_server() for rank in self.ranks}
        self.random, self.most_delay = random.Random(seed), most_delay
        self.owner: object = None
        self.clock = 0
        self.waiting: dict[int, tuple[int, Answer]] = {}  # by rank, in the order of the tasks: when the answer comes
        self.newest = Task(0, 0, 0, [])
        self.num_stale = self.num_overtaken = 0
        self.is_closed = False

    @property
    def busy(self) -> set[int]:
        return set(self.waiting)

    def send(self, rank: int, message: Prompt | Task | None) -> None:
        message = decode(encode(message))
        if isinstance(message, Prompt):
            self.servers[rank].begin(message)
        elif isinstance(message, Task):
            assert rank not in self.waiting, "a busy server was asked"
            self.newest = message
            due = self.clock + self.random.randint(0, self.most_delay)
            answer = decode(encode(self.servers[rank].answer(message)))
            assert isinstance(answer, Answer)
            self.waiting[rank] = due, answer

    def receive(self, seconds: float) -> tuple[int, Answer] | None:
        self.clock += 1
        if seconds and self.waiting:
            self.clock = max(self.clock, min(time for time, _ in self.waiting.values()))
        due = [rank for rank, (time, _) in self.waiting.items() if time <= self.clock]
        if not due:
            return None
        rank = self.random.choice(due)
        self.num_overtaken += rank != next(iter(self.waiting))
        _, answer = self.waiting.pop(rank)
        self.num_stale += answer.version < self.newest.version
        return rank, answer

    def now(self) -> float:
        return float(self.clock)

    def close(self) -> None:
        self.is_closed = True
