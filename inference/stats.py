"""What a generation did and what it cost, counted so that it cannot flatter.

Acceptance length = tokens emitted by verify steps / verify steps, per row: the bonus token is counted, the prefill and
the token drawn from it are not, and tokens cut off by EOS or by the length limit are counted as the step emitted them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

PHASES = ("profile", "prefill", "draft", "verify", "accept", "commit")


@dataclass
class GenerationStats:
    """Attributes:
    num_target_forwards: forward passes of the target, chunks of the prefill included (each serves all rows).
    num_verify_passes: those of them that verified trees; in a batch a pass is a verify step of several rows.
    num_new_tokens: tokens returned, all rows together, after trimming.
    num_verify_steps: verify steps, each row counted on its own while it is unfinished.
    accepted_histogram: entry a = verify steps in which exactly a drafted tokens were accepted.
    num_drafted: drafted nodes verified, nodes a drafter had no token for included; roots are not counted.
    num_host_syncs: times the host waited to read a tensor of a verify step, whatever the batch: once for what was
        emitted; when processors read the prefix, also once for each level of the tree, root included. The reads of the
        prefill, those that processors make of themselves, and a `StagedDrafter`'s one per level behind the first
        are not counted; uploads are no reads.
    seconds: wall-clock seconds per phase (`profile`: making the drafter's buffers and, for `tree="auto"`, measuring
        costs the first time); `total` also holds what lies between the phases. On an accelerator the phases
        are launch times unless the decoder was told to synchronise; `total` is always right. `compile`, a part of
        the phases it happens in, is time spent on the first calls of compiled graphs.
    """

    num_target_forwards: int = 0
    num_verify_passes: int = 0
    num_new_tokens: int = 0
    num_verify_steps: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_host_syncs: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, "compile", "total"), 0.0))

    def count_step(self, accepted: int) -> None:
        """Records one row's verify step that accepted so many drafted tokens (and emitted one more)."""
        self.num_verify_steps += 1
        self.accepted_histogram += [0] * (accepted + 1 - len(self.accepted_histogram))
        self.accepted_histogram[accepted] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens a verify step emits on average; 1.0 when there was none (plain decoding's value)."""
        if not self.num_verify_steps:
            return 1.0
        return 1.0 + sum(a * n for a, n in enumerate(self.accepted_histogram)) / self.num_verify_steps

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Entry d - 1: how often depth d was accepted, given that depth d - 1 was (d = 1: of all steps)."""
        reached = [sum(self.accepted_histogram[depth:]) for depth in range(len(self.accepted_histogram))]
        return [reached[d] / reached[d - 1] if reached[d - 1] else 0.0 for d in range(1, len(reached))]

    @property
    def overhead_seconds(self) -> float:
        """Time in no phase's target or drafter: acceptance, commits and bookkeeping."""
        return (
            self.seconds["total"]
            - self.seconds["profile"]
            - self.seconds["prefill"]
            - self.seconds["draft"]
            - self.seconds["verify"]
        )

    def __add__(self, other: GenerationStats) -> GenerationStats:
        """Statistics of several generations together."""
        longest = max(len(self.accepted_histogram), len(other.accepted_histogram))
        padded = [x.accepted_histogram + [0] * (longest - len(x.accepted_histogram)) for x in (self, other)]
        return GenerationStats(
            self.num_target_forwards + other.num_target_forwards,
            self.num_verify_passes + other.num_verify_passes,
            self.num_new_tokens + other.num_new_tokens,
            self.num_verify_steps + other.num_verify_steps,
            [a + b for a, b in zip(*padded, strict=True)],
            self.num_drafted + other.num_drafted,
            self.num_host_syncs + other.num_host_syncs,
            {name: self.seconds[name] + other.seconds[name] for name in self.seconds},
        )


class PhaseClock:
    """Adds wall-clock time to the phases of a `GenerationStats`; it runs from the beginning, and can be paused."""

    def __init__(self, stats: GenerationStats, device: torch.device, *, is_synchronised: bool = False) -> None:
        self.stats = stats
        self.device = device
        self.is_synchronised = is_synchronised and device.type == "cuda"
        self._started: float | None = time.perf_counter()
        self.last = time.perf_counter()

    def start(self) -> None:
        """The next `stop` counts from here; so does the total, after a pause."""
        self.last = self._now()
        if self._started is None:
            self._started = self.last

    def stop(self, phase: str) -> None:
        """Books the time since the last `start` or `stop` under `phase`."""
        now = self._now()
        self.stats.seconds[phase] += now - self.last
        self.last = now

    def pause(self) -> None:
        """Books the total; the time until the next `start` belongs to nobody."""
        if self._started is not None:
            self.stats.seconds["total"] += time.perf_counter() - self._started
            self._started = None

    def _now(self) -> float:
        if self.is_synchronised:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
