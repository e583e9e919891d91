"""A simulation of distributed speculative inference: the real protocol, with a clock that costs move.

The target writes zeros. A draft is right (0) with a given chance, whatever was drafted before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftsmith.inference.distributed.chain import DraftChain
from draftsmith.inference.distributed.coordinator import Coordinator, Link
from draftsmith.inference.distributed.messages import Answer, Prompt, Task
from draftsmith.inference.distributed.timeline import Timeline

RIGHT, WRONG = 0, 1
Draft = Callable[[DraftChain], int | None]


@dataclass(frozen=True)
class Costs:
    """Seconds of a draft, of a verification and of a message.

    Attributes:
        spread: standard deviation of drafts and verifications, relative to their means. Without it an answer may
            always come just before, or just after, the end of a draft.
    """

    draft: float
    verify: float
    message: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True)
class Setting:
    """How a text is decoded. lookahead: None = chosen while decoding."""

    servers: int
    acceptance: float
    lookahead: int | None = None
    max_ahead: int = 32


@dataclass
class Outcome:
    """Of one text: tokens and seconds, the share of tasks whose answers were all too late, the share of drafts that
    were dropped, and the share of the drafting time in which a server verified."""

    tokens: int
    seconds: float
    wasted: float
    dropped: float
    overlap: float

    @classmethod
    def of_timeline(cls, timeline: Timeline, tokens: int, seconds: float) -> Outcome:
        num_drafts = max(1, len(timeline.drafts))
        wasted = timeline.num_wasted / max(1, len(timeline.verifications))
        return cls(tokens, seconds, wasted, timeline.num_dropped / num_drafts, timeline.overlap)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


class VirtualLink:
    """Servers that answer after their costs, on a clock that only costs move.

    Args:
        recorded: a run, from which the times of drafts and verifications are drawn instead. Under load a few drafts
            take long, and an answer more often comes during a long one.
    """

    def __init__(self, costs: Costs, num_servers: int, seed: int, recorded: Timeline | None = None) -> None:
        self._drafts = self._verifications = [0.0]
        if recorded is not None:
            self._drafts = [one.ended - one.began for one in recorded.drafts]
            self._verifications = [one.seconds for one in recorded.verifications if one.received is not None]
        self._is_recorded = recorded is not None
        self.costs, self.ranks = costs, tuple(range(1, num_servers + 1))
        self._generator = random.Random(1000 * seed + num_servers)
        self.owner: object = None
        self.clock = 0.0
        self._answers: dict[int, tuple[float, Answer]] = {}

    @property
    def busy(self) -> set[int]:
        return set(self._answers)

    def send(self, rank: int, message: Prompt | Task | None) -> None:
        if isinstance(message, Task):
            seconds = self._draw(self.costs.verify, self._verifications)
            self._answers[rank] = self.clock + seconds + 2 * self.costs.message, answer_rightly(message, seconds)

    def receive(self, seconds: float) -> tuple[int, Answer] | None:
        if not self._answers:
            return None
        rank = min(self._answers, key=lambda one: self._answers[one][0])
        due = self._answers[rank][0]
        if due > self.clock + seconds:
            return None
        self.clock = max(self.clock, due)
        return rank, self._answers.pop(rank)[1]

    def pay_for_draft(self) -> None:
        self.clock += self._draw(self.costs.draft, self._drafts)

    def _draw(self, mean: float, recorded: list[float]) -> float:
        if self._is_recorded:
            return self._generator.choice(recorded)
        return max(0.0, self._generator.gauss(mean, self.costs.spread * mean))

    def now(self) -> float:
        return self.clock

    def close(self) -> None:
        """There is nothing to end."""


def answer_rightly(task: Task, seconds: float) -> Answer:
    return Answer(task.version, task.start, [RIGHT] * task.num_asked, seconds=seconds)


def make_draft(acceptance: float, seed: int, pay: Callable[[], None]) -> Draft:
    """Drafts that are right with this chance; `pay` spends the time of one."""
    generator = random.Random(seed)

    def draft(chain: DraftChain) -> int:
        pay()
        return RIGHT if generator.random() < acceptance else WRONG

    return draft


def decode(link: Link, setting: Setting, draft: Draft, num_tokens: int) -> tuple[Outcome, Timeline]:
    """Decodes one text with the servers of a link."""
    coordinator = Coordinator(link, lookahead=setting.lookahead, max_ahead=setting.max_ahead, timeout=60.0)
    prompt = [RIGHT]
    coordinator.begin(Prompt(prompt, prompt, num_tokens, None))
    chain, began = DraftChain(prompt), link.now()
    for _ in coordinator.run(chain, draft, 1 + num_tokens):
        if len(chain.text) > num_tokens:
            break
    timeline = coordinator.timeline
    return Outcome.of_timeline(timeline, len(chain.text) - 1, link.now() - began), timeline


def simulate(costs: Costs, setting: Setting, num_tokens: int, *, seed: int = 0) -> Outcome:
    """Decodes one text on a virtual clock."""
    link = VirtualLink(costs, setting.servers, seed)
    return decode(link, setting, make_draft(setting.acceptance, seed, link.pay_for_draft), num_tokens)[0]


def replay(costs: Costs, setting: Setting, timeline: Timeline, num_tokens: int, *, seed: int = 0) -> Outcome:
    """Simulates a real run: drafts are wrong where a round of that run ended, so that no luck is left in the
    comparison, and times are drawn from that run's."""
    link = VirtualLink(costs, setting.servers, seed, timeline)
    wrong = {position - timeline.verifications[0].start for position in timeline.rounds.values()}

    def draft(chain: DraftChain) -> int:
        link.pay_for_draft()
        return WRONG if chain.end in wrong else RIGHT

    return decode(link, setting, draft, num_tokens)[0]


def synchronous_seconds(costs: Costs, acceptance: float, num_drafts: int) -> float:
    """Seconds per token of speculation that waits: `num_drafts` drafts, then a pass over them and the root.

    >>> synchronous_seconds(Costs(draft=0.1, verify=1.0), 1.0, 4)
    0.28
    """
    tokens = sum(acceptance**depth for depth in range(num_drafts + 1))
    return (num_drafts * costs.draft + costs.verify) / tokens


def best_synchronous(costs: Costs, acceptance: float) -> float:
    """The smallest seconds per token of 0 (plain decoding) to 32 drafts."""
    return min(synchronous_seconds(costs, acceptance, number) for number in range(33))


def sweep(
    ratios: Iterable[float],
    acceptances: Iterable[float],
    servers: Iterable[int],
    *,
    message: float,
    spread: float,
    num_tokens: int,
) -> list[dict[str, Any]]:
    """Speed over plain and over synchronous speculation; a verification takes 1, a draft `ratio`. The lookahead is
    chosen while decoding, and `best_lookahead` is the fixed one that decodes fastest."""
    rows = []
    servers, acceptances = list(servers), list(acceptances)
    for ratio in ratios:
        costs = Costs(draft=ratio, verify=1.0, message=message, spread=spread)
        for acceptance in acceptances:
            plain, waiting = costs.verify, best_synchronous(costs, acceptance)
            for number in servers:
                setting = Setting(number, acceptance)
                chosen = simulate(costs, setting, num_tokens)
                fixed = {
                    size: simulate(costs, replace(setting, lookahead=size), num_tokens) for size in (1, 2, 4, 8, 16)
                }
                best = max(fixed, key=lambda size: fixed[size].tokens_per_second)
                rows.append(
                    {
                        "ratio": ratio,
                        "acceptance": acceptance,
                        "gpus": number + 1,
                        "over_plain": plain * chosen.tokens_per_second,
                        "over_synchronous": waiting * chosen.tokens_per_second,
                        "synchronous_over_plain": plain / waiting,
                        "wasted": chosen.wasted,
                        "overlap": chosen.overlap,
                        "best_lookahead": best,
                        "best_over_plain": plain * fixed[best].tokens_per_second,
                    }
                )
    return rows
