"""Executor: how the functions of a decode step run. This one runs them eagerly; `compiled.py` and `captured.py` have
others.

A step's parts are functions of tensors. Whatever differs from step to step is a tensor or the shape of one, so that the
same functions can be compiled, or captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from draftsmith.inference.cache.tree_cache import VIEW_MULTIPLE


class Executor:
    """Runs functions as they are.

    Attributes:
        has_graphs: whether each shape of a function's arguments makes a graph, by compiling or by capturing.
        keeps_graphs: whether graphs outlive the caches that they were made with.
        reads_prompts: whether the graph that verifies trees serves any number of nodes at full speed, and so prompts.
        view_multiple: views of the cache are rounded up to a multiple of this many slots.
        compile_seconds: seconds spent on making graphs so far.
    """

    has_graphs: bool = False
    keeps_graphs: bool = False
    reads_prompts: bool = False
    view_multiple: int = VIEW_MULTIPLE
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

    def keep(self, values: Tensor) -> Tensor:
        """Values that a function has returned, for use after its next run: captured, that run overwrites them."""
        return values

    def forget(self) -> None:
        """Drops what belongs to caches that are no longer used."""
