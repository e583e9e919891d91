"""Timeline: who verified what and when, in one call, and what of it was dropped. Times are rank 0's clock."""

from dataclasses import dataclass, field


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
    num_drafted: drafted tokens; draft_seconds: the time that they took.
    rounds: by version, the position of the target's own token that ended it.
    """

    num_drafted: int = 0
    draft_seconds: float = 0.0
    verifications: list[Verification] = field(default_factory=list)
    rounds: dict[int, int] = field(default_factory=dict)

    @property
    def num_wasted(self) -> int:
        """Verifications that began after a wrong draft: no answer of theirs was used."""
        return sum(one.start >= self.rounds.get(one.version, one.start + 1) for one in self.verifications)
