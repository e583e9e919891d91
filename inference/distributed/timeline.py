"""Timeline: who drafted and who verified when, in one call, and what of it was dropped. Times are rank 0's clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Draft:
    """A drafted token: its position, the version of the chain, and seconds."""

    position: int
    version: int
    began: float
    ended: float


@dataclass
class Verification:
    """A task: `num_asked` positions from `start` on.

    Attributes:
        sent, received: seconds, on rank 0; received is None until the answer is read.
    """

    rank: int
    version: int
    start: int
    num_asked: int
    sent: float
    received: float | None = None


@dataclass
class Timeline:
    """Attributes:
    rounds: by version, the position of the target's own token that ended it.
    """

    drafts: list[Draft] = field(default_factory=list)
    verifications: list[Verification] = field(default_factory=list)
    rounds: dict[int, int] = field(default_factory=dict)

    @property
    def num_wasted(self) -> int:
        """Verifications that began after a wrong draft: no answer of theirs was used."""
        return sum(one.start >= self.rounds.get(one.version, one.start + 1) for one in self.verifications)

    @property
    def overlap(self) -> float:
        """The share of the drafting time in which a server verified."""
        verifying = [(one.sent, one.received) for one in self.verifications if one.received is not None]
        drafting = [(one.began, one.ended) for one in self.drafts]
        seconds = measure_union(drafting)
        return (seconds + measure_union(verifying) - measure_union(drafting + verifying)) / seconds if seconds else 0.0


def measure_union(spans: list[tuple[float, float]]) -> float:
    """The time that spans cover together.

    >>> measure_union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)])
    3.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
