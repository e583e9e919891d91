"""TokenStream: a text that is read while it is written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from inference.loop import GenerationOutput


class TokenStream:
    """Yields the tokens of each step, a list of one or more, as soon as they are certain.

    It is read with `for` or, from a coroutine, with `async for` (a step then runs in a thread, and the event loop goes
    on). Nothing is computed ahead of the reader. To stop early, `close()` it, leave its `with` or `async with` block,
    or drop it; a coroutine that is cancelled while it waits for a step closes it behind that step.
    """

    def __init__(
        self, steps: Iterator[list[int]], gather: Callable[[], GenerationOutput], release: Callable[[], None]
    ) -> None:
        """
        Args:
            steps: a generator of the tokens.
            gather: the output so far.
            release: called when it is over; may be called more than once.
        """
        self._steps = _Steps(steps, release)
        self._gather = gather

    @property
    def output(self) -> GenerationOutput:
        """What `generate` would return: of the whole text once it has ended, until then of what there is."""
        return self._gather()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[int]:
        tokens = self._steps.advance()
        if tokens is None:
            raise StopIteration
        return tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[int]:
        step = asyncio.get_running_loop().run_in_executor(None, self._steps.advance)
        try:
            tokens = await asyncio.shield(step)
        except asyncio.CancelledError:
            step.add_done_callback(_retrieve)
            self._steps.close_soon()  # a step that has begun cannot be interrupted
            raise
        if tokens is None:
            raise StopAsyncIteration
        return tokens

    def close(self) -> None:
        """Ends the text here. The decoder is free again, and may go on from what there is (`reuse_cache`). Called from
        within a step (by a logits processor, or a signal's handler), it ends behind that step."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`; waits for a step that has begun."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._steps.close_soon()


class _Steps:
    """The steps of one text, one at a time, in any thread. A thread that has run one may hold on to this for a while,
    so it is not the stream itself, which would not be dropped until then."""

    def __init__(self, steps: Iterator[list[int]], release: Callable[[], None]) -> None:
        self._steps: Iterator[list[int]] | None = steps
        self._release = release
        self._one_at_a_time = threading.Lock()
        self._running_thread: int | None = None
        self._is_to_close = False

    def advance(self) -> list[int] | None:
        """The next step's tokens; None when there are no more."""
        try:
            with self._one_at_a_time:
                self._running_thread = threading.get_ident()
                try:
                    return None if self._steps is None else next(self._steps, None)
                finally:
                    self._running_thread = None
        finally:
            if self._is_to_close:
                self.close()

    def close(self) -> None:
        """Waits for a step of another thread."""
        if self._running_thread == threading.get_ident():
            self._is_to_close = True
            return
        with self._one_at_a_time:
            self._end()
        self._release()

    def close_soon(self) -> None:
        """`close` that does not wait: a step that is running closes behind itself."""
        self._is_to_close = True  # before the lock is tried: a step looks at it after it has let go of the lock
        if self._one_at_a_time.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._one_at_a_time.release()
            self._release()

    def _end(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()  # type: ignore[attr-defined]


def _retrieve(step: asyncio.Future[list[int] | None]) -> None:
    if not step.cancelled():
        step.exception()  # nobody is left to be told
