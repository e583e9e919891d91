"""CompiledExecutor gives every function to torch.compile in the same way. Nothing is compiled here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
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


def test_kernels_are_kept_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    CompiledExecutor([])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    CompiledExecutor([])
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)


def test_a_cache_folder_that_cannot_be_made_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draftsmith").touch()
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    CompiledExecutor([])
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
