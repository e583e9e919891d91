"""TokenStream: a text that is read while it is decoded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from draftsmith.inference.openmp import release_workers

if TYPE_CHECKING:
    from draftsmith.inference.engine import GenerationOutput, StepTokens


class TokenStream:
    """Yields the tokens of each step, a list of one or more that also tells which of them were drafted (`StepTokens`).

    Read it with `for` or, in a coroutine, with `async for`, which runs each step in a thread. Nothing is computed ahead
    of the reader. To stop early, call `close()`, leave the `with` block, or drop the stream. If a coroutine is
    cancelled while it waits for a step, the stream closes after this step.
    """

    def __init__(
        self, steps: Iterator[StepTokens], gather: Callable[[], GenerationOutput], release: Callable[[], None]
    ) -> None:
        """
        Args:
            steps: a generator.
            gather: returns the output so far.
            release: called at the end, possibly several times.
        """
        self._steps = _Steps(steps, release)
        self._gather = gather

    @property
    def output(self) -> GenerationOutput:
        """What `generate` would return, for the tokens so far."""
        return self._gather()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepTokens:
        tokens = self._steps.advance()
        if tokens is None:
            raise StopIteration
        return tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepTokens:
        try:
            tokens = await asyncio.to_thread(self._steps.advance_in_thread)
        except asyncio.CancelledError:
            self.close()
            raise
        if tokens is None:
            raise StopAsyncIteration
        return tokens

    def close(self) -> None:
        """Ends the text and frees the decoder, which can continue it later (`reuse_cache`).

        A step that is running, in any thread, ends first; `close` does not wait for it.
        """
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Steps:
    """Runs the steps of one text, one at a time, in any thread.

    A thread may hold this object for a while after a step; the stream itself can be dropped before.
    """

    def __init__(self, steps: Iterator[StepTokens], release: Callable[[], None]) -> None:
        self._steps: Iterator[StepTokens] | None = steps
        self._release = release
        self._one_at_a_time = threading.Lock()
        self._is_to_close = False

    def advance(self) -> StepTokens | None:
        """Returns the next step's tokens; None at the end."""
        try:
            with self._one_at_a_time:
                return None if self._steps is None else next(self._steps, None)
        finally:
            if self._is_to_close:
                self.close()

    def advance_in_thread(self) -> StepTokens | None:
        """`advance` in a thread that may not run the next step."""
        try:
            return self.advance()
        finally:
            release_workers()

    def close(self) -> None:
        """Ends the text; a running step does so when it ends."""
        self._is_to_close = True  # set before the lock is tried: a step reads it after it has released the lock
        if not self._one_at_a_time.acquire(blocking=False):
            return
        try:
            steps, self._steps = self._steps, None
            if steps is not None:
                steps.close()  # type: ignore[attr-defined]
        finally:
            self._one_at_a_time.release()
        self._release()
