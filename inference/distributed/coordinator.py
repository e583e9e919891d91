"""Coordinator: drafts without waiting, hands tasks to free servers, and takes answers in whatever order they come."""

import math
from collections.abc import Callable, Iterator

from draftsmith.inference.distributed.chain import DraftChain
from draftsmith.inference.distributed.gloo_link import GlooLink
from draftsmith.inference.distributed.messages import Answer, Prompt
from draftsmith.inference.distributed.timeline import Timeline, Verification

SMOOTHING = 0.9  # of the measured times that choose the lookahead: a text's typical task outlives one odd one


class Coordinator:
    """Decodes texts, one after the other, with the servers of a link.

    Args:
        lookahead: drafts that wait before a free server is asked about them; None = the fewest that do not have to wait
            for a server, by measured times: lookahead * (time of a draft) * servers >= time of a verification
            (section 3.1 of the paper).
        max_ahead: the most drafts after the committed text.
        timeout: seconds to wait for an answer.

    Attributes:
        timeline: of the last text.
    """

    def __init__(self, link: GlooLink, *, lookahead: int | None, max_ahead: int, timeout: float) -> None:
        self.link, self.max_ahead, self.timeout = link, max_ahead, timeout
        self.timeline = Timeline()
        self._lookahead = lookahead
        self._seconds: dict[str, float] = {}  # smoothed times of a draft and of a verification
        self._held = dict.fromkeys(link.ranks, 0)  # how many tokens of the text each server has in its cache
        self._asked: dict[int, Verification] = {}  # what each busy server works on, in this text

    def begin(self, prompt: Prompt) -> None:
        """Lets all servers read a prompt, when answers of the text before have come."""
        while self.link.busy:
            self._receive(self.timeout)
        self._asked.clear()
        self.timeline = self.link.owner = Timeline()
        for rank in self.link.ranks:
            self.link.send(rank, prompt)
            self._held[rank] = len(prompt.token_ids)

    def run(self, chain: DraftChain, draft: Callable[[DraftChain], int | None], max_length: int) -> Iterator[list[int]]:
        """Yields the tokens that each answer commits, until the caller stops.

        Args:
            draft: the next token of the chain, or None when it has none before the text grows.
            max_length: nothing is drafted beyond it.
        """
        timeline = self.timeline
        while True:
            self._check(timeline)
            self._ask(chain)
            has_drafted = self._draft(chain, draft, max_length)
            self._ask(chain)
            received = self._receive(0.0 if has_drafted else self.timeout)
            while received is not None:
                if committed := self._take(chain, *received):
                    yield committed
                    self._check(timeline)
                    self._ask(chain)
                received = self.link.receive(0.0)

    def _check(self, timeline: Timeline) -> None:
        if self.link.owner is not timeline:
            raise RuntimeError(
                "another text began before this one ended, and the servers hold one: read a stream to its end, or "
                "close it, before the next call"
            )

    def _receive(self, seconds: float) -> tuple[int, Answer] | None:
        received = self.link.receive(seconds)
        if received is None and seconds:
            raise TimeoutError(
                f"no answer for {seconds:g} seconds from the target servers of ranks {sorted(self.link.busy)}: look at "
                "their output, or give a longer timeout"
            )
        return received

    @property
    def lookahead(self) -> int:
        if self._lookahead is not None:
            return self._lookahead
        if len(self._seconds) < 2:
            return 1
        turn = self._seconds["draft"] * len(self.link.ranks)
        return max(1, min(self.max_ahead, math.ceil(self._seconds["verify"] / max(turn, 1e-9))))

    def _draft(self, chain: DraftChain, draft: Callable[[DraftChain], int | None], max_length: int) -> bool:
        if len(chain.drafts) >= self.max_ahead or chain.end >= max_length:
            return False
        began = self.link.now()
        token = draft(chain)
        if token is None:
            return False
        seconds = self.link.now() - began
        self.timeline.num_drafted += 1
        self.timeline.draft_seconds += seconds
        chain.drafts.append(token)
        self._measure("draft", seconds)
        return True

    def _ask(self, chain: DraftChain) -> None:
        """Hands out a task if one is due and a server is free: the one that missed least."""
        free = [rank for rank in self.link.ranks if rank not in self.link.busy]
        if not free or not chain.wants_task(self.lookahead):
            return
        rank = max(free, key=self._held.__getitem__)
        task = chain.ask(self._held[rank])
        self._held[rank] = chain.end
        self._asked[rank] = Verification(rank, task.version, task.start, task.num_asked, self.link.now())
        self.timeline.verifications.append(self._asked[rank])
        self.link.send(rank, task)

    def _take(self, chain: DraftChain, rank: int, answer: Answer) -> list[int]:
        asked = self._asked.pop(rank)
        asked.received = self.link.now()
        self._measure("verify", asked.received - asked.sent)
        version = chain.version
        committed = chain.take(answer)
        if chain.version != version:
            self.timeline.rounds[version] = chain.root
            for each in self._held:
                self._held[each] = min(self._held[each], chain.root)
        return committed

    def _measure(self, name: str, seconds: float) -> None:
        self._seconds[name] = SMOOTHING * self._seconds.get(name, seconds) + (1 - SMOOTHING) * seconds
