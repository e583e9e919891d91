"""What is replaced for the whole process while a thread needs it: threads that overlap leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import masking_utils

from draftsmith.inference.kernels.attention import GROUPED, STOCK, grouped_attention
from draftsmith.training.features.encoding import encode
from tests.inference.serving.arrivals import SECONDS
from tests.tiny_targets import random_prompt, target_of

PACKED = torch.tensor([[0, 1, 2, 0, 1]])


def overlap(enter: Callable[[], AbstractContextManager[Any]], look: Callable[[], Any]) -> list[Any]:
    """What is seen before, in one thread, then in another, there when the first has left, and when both have."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:

        def see(thread: ThreadPoolExecutor, act: Callable[..., Any], *args: Any) -> Any:
            return thread.submit(lambda: (act(*args), look())[1]).result(SECONDS)

        first, second = enter(), enter()
        found = [look(), see(one, first.__enter__), see(other, second.__enter__)]
        see(one, first.__exit__, None, None, None)
        found.append(see(other, bool))
        see(other, second.__exit__, None, None, None)
    return [*found, look()]


def test_passes_of_many_threads_leave_nothing_behind() -> None:
    target, original = target_of("llama"), masking_utils.find_packed_sequence_indices
    ids = random_prompt(9)
    expected = encode(target, ids, torch.ones_like(ids)).last_hidden
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(20):
            found = encode(target, ids, torch.ones_like(ids)).last_hidden
            wrong.extend([] if torch.allclose(found, expected, atol=1e-5) else [found])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not wrong
    assert masking_utils.find_packed_sequence_indices is original
    assert target.model.config._attn_implementation == STOCK


def test_attention() -> None:
    config = target_of("llama", num_hidden_layers=1).model.config
    found = overlap(lambda: grouped_attention(config), lambda: config._attn_implementation)
    assert found == [STOCK, GROUPED, GROUPED, GROUPED, STOCK]
