"""PromptBuffers: caches of one row in which prompts are read before they join the running rows.

A buffer keeps its prompt until it is needed for another one. A prompt that begins like one of them, or like the text of
a running row, reads only the rest (`HeldTexts`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from draftsmith.inference.cache.tree_cache import TreeCache
from draftsmith.inference.execution.step import DecodeStep
from draftsmith.inference.prompts import MIN_SHARED, HeldTexts, PromptReader, ReadPrompts, Reused
from draftsmith.inference.stats import GenerationStats

NUM_BUFFERS = 2  # one would forget a conversation whenever another prompt comes in between


@dataclass
class PromptBuffer:
    """A cache of one row; `held` is None while a prompt is being read, and before the first."""

    cache: TreeCache
    held: HeldTexts | None = None


class PromptBuffers:
    """The buffers of one lane.

    Args:
        capacity: slots, as many as the lane's cache has per row: rows move from the one to the other.
    """

    def __init__(self, step: DecodeStep, capacity: int) -> None:
        self._step = step
        self._buffers = [PromptBuffer(step.new_cache(1, capacity)) for _ in range(NUM_BUFFERS)]  # oldest first

    def read(
        self, prompt: list[int], running: HeldTexts | None
    ) -> Generator[int, None, tuple[PromptBuffer, ReadPrompts]]:
        """Reads a prompt into the oldest buffer; yields the size of each chunk after it was read."""
        reused = self._find_reused(prompt, running)
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        buffer.held = None
        reader = PromptReader(self._step, buffer.cache, [prompt], None, GenerationStats(), reused)
        read = yield from reader.chunks()
        num_taken = None if self._step.drafter is None else [len(prompt) - 1]
        buffer.held = HeldTexts(buffer.cache, read.state, [prompt], num_taken)
        return buffer, read

    def _find_reused(self, prompt: list[int], running: HeldTexts | None) -> Reused | None:
        """The longest beginning of the prompt that is held somewhere, if it saves enough."""
        sources = [held for held in (running, *(one.held for one in self._buffers)) if held is not None]
        room = self._buffers[0].cache.capacity
        if self._step.target.max_length is not None:
            room = min(room, self._step.target.max_length)
        found: list[Any] = [held.match([prompt], room=room, needs_all=True) for held in sources]
        best = max((one for one in found if one is not None), key=lambda one: one.kept[0], default=None)
        return best if best is not None and best.kept[0] >= MIN_SHARED else None
