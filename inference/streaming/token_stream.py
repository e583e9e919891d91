"""TokenStream: a text that is read while it is decoded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from draftsmith.inference.engine import GenerationOutput, StepTokens


class TokenStream:
    """Yields the tokens of each step, a list of one or more that also tells which of them were drafted (`StepTokens`).

    Nothing is computed ahead of the reader. To stop early, call `close()`, leave the `with` block, or drop the stream.
    """

    def __init__(
        self,
        steps: Generator[StepTokens, None, None],
        gather: Callable[[], GenerationOutput],
        release: Callable[[], None],
    ) -> None:
        """
        Args:
            gather: returns the output so far.
            release: called at the end, possibly several times.
        """
        self._steps, self._gather, self._release = steps, gather, release
        self._is_to_close = False

    @property
    def output(self) -> GenerationOutput:
        """What `generate` would return, for the tokens so far."""
        return self._gather()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepTokens:
        try:
            return next(self._steps)
        finally:
            if self._is_to_close:
                self.close()

    def close(self) -> None:
        """Ends the text and frees the decoder, which can continue it later (`reuse_cache`).

        A step that is running ends first; `close` does not wait for it.
        """
        self._is_to_close = True
        if inspect.getgeneratorstate(self._steps) != inspect.GEN_RUNNING:
            self._steps.close()
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
