"""What is replaced for the whole process while a thread needs it: threads that overlap leave nothing behind."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import masking_utils

from draftsmith.inference.kernels.attention import GROUPED, STOCK, grouped_attention
from draftsmith.training.features.encoding import encode
from tests.inference.serving.arrivals import SECONDS
from tests.tiny_targets import random_prompt, target_of


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
    """Replaced in one thread, then in another; it is there when the first has left, and gone when both have."""
    config = target_of("llama", num_hidden_layers=1).model.config
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:

        def see(thread: ThreadPoolExecutor, act: Callable[..., Any], *args: Any) -> str:
            """What a thread finds after an act of its own."""
            return thread.submit(lambda: (act(*args), config._attn_implementation)[1]).result(SECONDS)

        first, second = grouped_attention(config), grouped_attention(config)
        assert config._attn_implementation == STOCK
        assert (see(one, first.__enter__), see(other, second.__enter__)) == (GROUPED, GROUPED)
        assert (see(one, first.__exit__, None, None, None), see(other, bool)) == (GROUPED, GROUPED)
        see(other, second.__exit__, None, None, None)
    assert config._attn_implementation == STOCK
