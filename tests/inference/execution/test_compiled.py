"""CompiledExecutor gives every function to torch.compile in the same way. Nothing is compiled here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inference.execution.compiled import CompiledExecutor

Options = list[dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Options:
    """The options of each call of torch.compile, which takes the filter out of the dictionary that it gets."""
    found: Options = []

    def compile_nothing(function: Callable[..., Any], *, options: dict[str, Any], **kwargs: Any) -> Callable[..., Any]:
        found.append({"name": function.__code__.co_name, "filter": options.pop("guard_filter_fn", None)})
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    return found


def double(value: int) -> int:
    return 2 * value


@torch.no_grad()
def triple(value: int) -> int:
    return 3 * value


def test_every_function_drops_the_guards_on_modules(calls: Options) -> None:
    executor = CompiledExecutor([])
    assert (executor.run(double, 2), executor.run_fixed(double, 2)) == (4, 4)
    assert [call["filter"] is not None for call in calls] == [True, True]


def test_a_decorated_function_is_compiled_without_its_decorator(calls: Options) -> None:
    assert CompiledExecutor([]).run(triple, 2) == 6
    assert calls[0]["name"].startswith("triple_")
