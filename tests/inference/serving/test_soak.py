"""A server for a long time: no memory grows, no row is left behind."""

import asyncio
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.inference.serving.arrivals import SECONDS
from tests.inference.serving.conftest import Running

NUM_WARM, NUM_REQUESTS, NUM_CLIENTS = 2_000, 10_000, 16


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
    assert served.metric("num_requests_running") == 0
    assert served.metric("request_success_total", finished_reason="error") is None
    assert served.metric("request_success_total", finished_reason="abort") > 100
