"""A server for a long time: no memory grows, no row is left behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from draftsmith.inference import Drafter, Target
from draftsmith.inference.planning.costs import StepCosts
from draftsmith.inference.serving.lane import Lane
from draftsmith.inference.serving.scheduler import Limits, Scheduler
from tests.heads.tiny_heads import tiny_heads
from tests.inference.serving.arrivals import SECONDS, Arrival, drafters_of, end
from tests.inference.serving.conftest import Running
from tests.memory_tracker import count_bytes
from tests.tiny_targets import target_of

NUM_WARM, NUM_REQUESTS, NUM_CLIENTS = 2_000, 10_000, 16
NUM_STEPS = 2_000  # of a batch that never drafts


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def ask_many(served: Running, count: int, seed: int) -> None:
    """Short requests of all kinds; one in eight clients goes away at once."""
    draws, numbers = random.Random(seed), iter(range(count))

    async def work(client: httpx.AsyncClient) -> None:
        for _ in numbers:
            body: dict[str, Any] = {"prompt": [draws.randrange(5, 4000) for _ in range(draws.randrange(1, 9))]}
            body |= {"max_tokens": draws.randrange(1, 6), "seed": draws.randrange(99), "stop": ["xyz"]}
            body |= draws.choice([{}, {"temperature": 0}, {"n": 2}, {"logprobs": 1}, {"frequency_penalty": 1.0}])
            if draws.random() < 1 / 8:
                with suppress(httpx.TimeoutException):
                    await client.post(f"{served.url}/completions", json=body | {"max_tokens": 150}, timeout=0.001)
            else:
                assert (await client.post(f"{served.url}/completions", json=body)).status_code in (200, 429)

    async with httpx.AsyncClient(timeout=SECONDS) as client:
        await asyncio.gather(*(work(client) for _ in range(NUM_CLIENTS)))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_is_flat(served: Running) -> None:
    asyncio.run(ask_many(served, NUM_WARM, seed=0))
    served.wait_until_idle()
    before = resident_bytes()
    asyncio.run(ask_many(served, NUM_REQUESTS, seed=1))
    served.wait_until_idle()
    assert resident_bytes() - before < 30e6
    assert served.metric("cache_rows_used") == served.metric("num_requests_running") == 0
    assert served.metric("request_success_total", finished_reason="error") is None
    assert served.metric("request_success_total", finished_reason="abort") > 100


def serve_steps(target: Target, drafter: Drafter, marks: Sequence[int], *, max_rows: int = 8) -> list[tuple[int, int]]:
    """Serves rows of all lengths that follow each other. Whenever the lane has made so many steps: bytes of its
    tensors, and of the process."""
    limits = Limits(max_rows=max_rows, max_length=256, max_waiting=4 * max_rows)
    scheduler = Scheduler(target, drafters_of(drafter), tree="auto", limits=limits)
    (lane,) = scheduler._lanes.values()
    draws, found, steps, is_done = random.Random(0), [], 0, threading.Event()

    def submit() -> None:
        prompt = torch.randint(5, target.vocab_size, (draws.randrange(1, 40),)).tolist()
        options = {"max_new_tokens": draws.randrange(2, 200), "do_sample": draws.random() < 0.5, "eos_token_id": None}
        arrival = Arrival(target, prompt, options)
        row = arrival.make_row(lambda: submit() if arrival.pieces[-1].is_last and not is_done.is_set() else None)
        scheduler.submit([row], ("draft", None))

    class Counting(Lane):
        def advance(self) -> None:
            nonlocal steps
            super().advance()
            steps += 1
            if steps in marks:
                found.append((count_bytes(self, besides=[target, drafter]), resident_bytes()))
            if steps == marks[-1]:
                is_done.set()

    lane.__class__ = Counting
    scheduler.start()
    for _ in range(max_rows + 1):  # one waits
        submit()
    assert is_done.wait()
    end(scheduler)
    return found


@pytest.mark.slow
def test_a_batch_that_never_drafts_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the lane: its cache, the drafter's state, and what waits for the drafter, which is read in parts."""
    monkeypatch.setattr(StepCosts, "expect", lambda _: [1.0, *[99.0] * 5])
    target = target_of("llama", num_hidden_layers=2)
    marks = range(NUM_STEPS // 10, NUM_STEPS + 1, NUM_STEPS // 10)
    found = [lane for lane, _ in serve_steps(target, tiny_heads("eagle3", target), marks, max_rows=3)]
    assert max(found) < min(found) + 100_000
