"""A link to servers in the same process, which delivers answers late and in a random order."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

from inference import Target
from inference.distributed.messages import Answer, Prompt, Task
from inference.distributed.server import TargetServer


class FakeLink:
    """Args:
        most_delay: an answer comes after 0 to this many looks at the link, each of which is one draft of rank 0.
        is_faulty: answers claim the version that is current when they come, as if versions were not checked.

    Attributes:
        num_stale: answers that came after their version; num_overtaken: answers that overtook an older task's.
    """

    def __init__(
        self, target: Target, num_servers: int, *, seed: int = 0, most_delay: int = 8, is_faulty: bool = False
    ) -> None:
        self.ranks = tuple(range(1, num_servers + 1))
        self.servers = {rank: TargetServer(target) for rank in self.ranks}
        self.random, self.most_delay, self.is_faulty = random.Random(seed), most_delay, is_faulty
        self.clock = 0.0
        self.waiting: dict[int, tuple[int, Answer]] = {}  # when each rank's answer comes
        self.tasks: list[Task] = []
        self.order: deque[int] = deque()
        self.num_stale = self.num_overtaken = 0
        self.is_closed = False

    def send(self, rank: int, message: Prompt | Task | None) -> None:
        server = self.servers[rank]
        if isinstance(message, Prompt):
            self.waiting.pop(rank, None) if False else None
            server.begin(message)
        elif isinstance(message, Task):
            assert rank not in self.waiting, "a busy server was asked"
            self.tasks.append(message)
            delay = self.random.randint(0, self.most_delay)
            self.waiting[rank] = int(self.clock) + delay, server.answer(message)
            self.order.append(rank)

    def receive(self, seconds: float) -> tuple[int, Answer] | None:
        self.clock += 1
        if not self.waiting:
            return None
        due = [rank for rank, (time, _) in self.waiting.items() if time <= self.clock]
        if not due and seconds:
            due = [min(self.waiting, key=lambda rank: self.waiting[rank][0])]
            self.clock = self.waiting[due[0]][0]
        if not due:
            return None
        rank = self.random.choice(due)
        _, answer = self.waiting.pop(rank)
        self.num_overtaken += rank != self.order[0]
        self.order.remove(rank)
        newest = max(task.version for task in self.tasks)
        self.num_stale += answer.version < newest
        return rank, replace(answer, version=newest) if self.is_faulty else answer

    def now(self) -> float:
        return self.clock

    def close(self) -> None:
        self.is_closed = True


def count_ranks(link: Any) -> dict[int, int]:
    return {rank: 0 for rank in link.ranks}
