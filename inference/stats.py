"""Counts and times of a generation.

Acceptance length = tokens emitted by verify steps / verify steps, per row. The bonus token counts. The prompt pass and
the token drawn from it do not. Tokens that EOS or the length limit cut off count, because a step emitted them.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

STEP_PHASES = ("draft", "verify", "accept", "commit")
PHASES = ("prefill", *STEP_PHASES, "compile", "total")


@dataclass
class GenerationStats:
    """Attributes:
    num_target_forwards: forward passes of the target, prefill chunks included. A pass serves all rows.
    num_verify_passes: the passes that verified trees. In a batch a pass is a verify step of several rows.
    num_new_tokens: tokens returned, of all rows together, after trimming.
    num_verify_steps: verify steps of unfinished rows; each row counts.
    accepted_histogram: entry a = verify steps in which exactly a drafted tokens were accepted.
    steps: of each row, the tokens that its verify steps emitted, in order. Sums have none.
    num_drafted: drafted nodes verified, without roots. Nodes for which a drafter had no token count.
    num_host_syncs: how often the host waited to read a tensor of a verify step. A step of any batch reads once for the
        emitted tokens, and once for each level of the tree (root included) for processors that run row by row. Not
        counted: reads of the prefill and within processors, a `StagedDrafter`'s one per level after the first, the
        numbers of nodes of a `BatchTree`, and what recurrent layers read of trees.
    seconds: wall-clock seconds per phase. `total` includes the time between phases. `compile`, a part of other phases,
        is the time of first calls of compiled graphs. On an accelerator the phases are launch times unless the decoder
        has `is_synchronised`; `total` is always right.
    """

    num_target_forwards: int = 0
    num_verify_passes: int = 0
    num_new_tokens: int = 0
    num_verify_steps: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_host_syncs: int = 0
    steps: list[list[int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def count_step(self, accepted: int) -> None:
        """Records one row's verify step, which accepted `accepted` drafted tokens and emitted one more."""
        self.num_verify_steps += 1
        self.accepted_histogram += [0] * (accepted + 1 - len(self.accepted_histogram))
        self.accepted_histogram[accepted] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step on average; 1.0, plain decoding's value, without verify steps."""
        if not self.num_verify_steps:
            return 1.0
        return 1.0 + sum(a * n for a, n in enumerate(self.accepted_histogram)) / self.num_verify_steps

    def acceptance_by_position(self, ends: Sequence[int]) -> list[float]:
        """The acceptance length of the steps that begin before each end, and not before the one ahead of it, counted in
        new tokens; up to the last part that has steps.

        >>> GenerationStats(steps=[[1, 3, 2, 2]]).acceptance_by_position([4, 100])
        [2.0, 2.0]
        """
        parts: list[list[int]] = [[] for _ in ends]
        for steps in self.steps:
            for begin, length in zip(itertools.accumulate(steps, initial=1), steps, strict=False):
                if (place := bisect.bisect_right(ends, begin)) < len(ends):
                    parts[place].append(length)
        return [sum(part) / len(part) for part in itertools.takewhile(len, parts)]

    @property
    def accepted_per_depth(self) -> list[int]:
        """Entry d - 1: in how many steps a draft of depth d was accepted."""
        return [sum(self.accepted_histogram[depth:]) for depth in range(1, len(self.accepted_histogram))]

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Entry d - 1: the rate at which depth d was accepted when depth d - 1 was (d = 1: in all steps)."""
        reached = [sum(self.accepted_histogram), *self.accepted_per_depth]
        return [count / above if above else 0.0 for above, count in itertools.pairwise(reached)]

    def split_step(self) -> dict[str, float]:
        """Milliseconds of a batch's verify step: `step`, without the prompts; its phases; `other`, the rest of it."""
        parts = {name: self.seconds[name] for name in STEP_PHASES}
        step = self.seconds["total"] - self.seconds["prefill"]
        parts = {"step": step, **parts, "other": step - sum(parts.values())}
        return {name: 1000 * value / self.num_verify_passes for name, value in parts.items()}

    def __add__(self, other: GenerationStats) -> GenerationStats:
        """The sum over generations."""
        histograms = itertools.zip_longest(self.accepted_histogram, other.accepted_histogram, fillvalue=0)
        return GenerationStats(
            self.num_target_forwards + other.num_target_forwards,
            self.num_verify_passes + other.num_verify_passes,
            self.num_new_tokens + other.num_new_tokens,
            self.num_verify_steps + other.num_verify_steps,
            [*map(sum, histograms)],
            self.num_drafted + other.num_drafted,
            self.num_host_syncs + other.num_host_syncs,
            seconds={name: self.seconds[name] + other.seconds[name] for name in self.seconds},
        )


class PhaseClock:
    """Adds wall-clock time to the phases of a `GenerationStats`. It runs from construction on and can be paused."""

    def __init__(self, stats: GenerationStats, device: torch.device, *, is_synchronised: bool = False) -> None:
        self.stats = stats
        self.device = device
        self.is_synchronised = is_synchronised and device.type == "cuda"
        self._started: float | None = time.perf_counter()
        self.last = time.perf_counter()

    def start(self) -> None:
        """Begins a phase; after a pause, also continues the total."""
        self.last = self._now()
        if self._started is None:
            self._started = self.last

    def stop(self, phase: str) -> None:
        """Adds the time since the last `start` or `stop` to `phase`."""
        now = self._now() if self.is_synchronised else time.perf_counter()
        self.stats.seconds[phase] += now - self.last
        self.last = now

    def pause(self) -> None:
        """Adds to the total; the time until the next `start` is not counted."""
        if self._started is not None:
            self.stats.seconds["total"] += time.perf_counter() - self._started
            self._started = None

    def _now(self) -> float:
        if self.is_synchronised:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
