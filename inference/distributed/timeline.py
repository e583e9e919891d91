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
        sent, received: seconds, on rank 0; received is None until the answer is there.
        seconds: the server's own time.
    """

    rank: int
    version: int
    start: int
    num_asked: int
    sent: float
    received: float | None = None
    seconds: float = 0.0


@dataclass
class Timeline:
    """Attributes:
    rounds: by version, the position of the target's own token that ended it.
    """

    drafts: list[Draft] = field(default_factory=list)
    verifications: list[Verification] = field(default_factory=list)
    rounds: dict[int, int] = field(default_factory=dict)

    def is_dropped(self, version: int, position: int) -> bool:
        """Whether a token drafted at this position was dropped."""
        return position >= self.rounds.get(version, position + 1)

    @property
    def num_wasted(self) -> int:
        """Verifications that began after a wrong draft: no answer of theirs was used."""
        return sum(self.is_dropped(one.version, one.start) for one in self.verifications)

    @property
    def num_dropped(self) -> int:
        """Drafts that were dropped."""
        return sum(self.is_dropped(one.version, one.position) for one in self.drafts)

    @property
    def overlap(self) -> float:
        """The share of the drafting time in which a server verified."""
        spans = merge_spans([(one.sent, one.received) for one in self.verifications if one.received is not None])
        drafting = sum(one.ended - one.began for one in self.drafts)
        both = sum(max(0.0, min(one.ended, end) - max(one.began, begin)) for one in self.drafts for begin, end in spans)
        return both / drafting if drafting else 0.0


def merge_spans(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time without overlaps, in order.

    >>> merge_spans([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)])
    [(0.0, 2.0), (3.0, 4.0)]
    """
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
