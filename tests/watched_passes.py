"""What a test notes of every cached pass of a target."""

from collections.abc import Callable

import pytest

from draftsmith.inference.cache.kv_cache import KVCache, Span


def watch_passes(monkeypatch: pytest.MonkeyPatch, look: Callable[[KVCache, int], int]) -> list[int]:
    """Grows with each pass by what `look` says of the cache, whose slots have been opened, and of its view's size."""
    seen: list[int] = []
    plain = KVCache.open_slots

    def open_slots(cache: KVCache, num_nodes: int, span: Span) -> None:
        plain(cache, num_nodes, span)
        seen.append(look(cache, cache.view))

    monkeypatch.setattr(KVCache, "open_slots", open_slots)
    return seen


def watch_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each pass has."""
    return watch_passes(monkeypatch, lambda cache, _: cache.batch_size)
