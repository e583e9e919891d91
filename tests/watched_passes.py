"""What a test notes of every cached pass of a target."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftsmith.inference.cache.tree_cache import TreeCache


def watch_passes(monkeypatch: pytest.MonkeyPatch, look: Callable[[TreeCache, int], int]) -> list[int]:
    """Grows with each pass by what `look` says of the cache, whose slots have been opened, and of its view's size."""
    seen: list[int] = []
    plain = TreeCache.open_slots

    def open_slots(cache: TreeCache, num_nodes: int, **kwargs: int) -> int:
        view = plain(cache, num_nodes, **kwargs)
        seen.append(look(cache, view))
        return view

    monkeypatch.setattr(TreeCache, "open_slots", open_slots)
    return seen


def watch_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each pass has."""
    return watch_passes(monkeypatch, lambda cache, _: cache.batch_size)
