"""Executor: how the functions of a decode step run. This one runs them eagerly; `compiled.py` has the other.

A step's parts are functions of tensors. Whatever differs from step to step is a tensor or the shape of one, so that the
same functions can be compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor


class Executor:
    """Runs functions as they are.

    Attributes:
        is_compiled: whether functions are compiled.
        compile_seconds: seconds spent on compiling so far.
    """

    is_compiled: bool = False
    compile_seconds: float = 0.0

    def active(self) -> AbstractContextManager[None]:
        """Functions are run inside this block."""
        return nullcontext()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`. Compiled, a number or size that has changed once is left open in the next graph,
        so that few graphs serve all sizes."""
        return function(*args, **kwargs)

    def run_fixed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`. Compiled, every new size makes a graph of its own, except sizes that `mark_open`
        has marked. It is for functions that read many weights, which run fastest at a known size."""
        return function(*args, **kwargs)

    def mark_open(self, values: Tensor, dim: int = 0) -> Tensor:
        """Says that this size of `values` changes from call to call; returns `values`."""
        return values
