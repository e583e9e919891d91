"""A server on a loopback port, with a tiny random target, whose drafts are the target's own."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerBase

from draftsmith.inference import SmallModelDrafter, Target
from draftsmith.inference.serving.app import create_app
from draftsmith.inference.serving.scheduler import Limits, Scheduler
from draftsmith.inference.serving.server import DrainingServer, address_of, bind
from tests.inference.serving.arrivals import SECONDS
from tests.tiny_targets import tiny_target

MODEL = "tiny"


@dataclass
class Running:
    """A server that runs in a thread."""

    address: str
    scheduler: Scheduler
    server: DrainingServer
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"{self.address}/v1"

    def client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=SECONDS, **settings)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.scheduler.metrics.registry.get_sample_value(f"draftsmith:{name}", labels)

    def wait_until_idle(self) -> None:
        """Until no row runs or waits."""
        end = time.monotonic() + SECONDS
        while self.scheduler._replies:
            assert time.monotonic() < end, "rows are left"
            time.sleep(0.01)

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        assert not self.scheduler.has_thread


@contextmanager
def running(target: Target, tokenizer: Any, *, limits: Limits, **options: Any) -> Iterator[Running]:
    """options: as in `create_app`."""
    scheduler = Scheduler(target, {"oracle": SmallModelDrafter(target)}, tree="chain:3", limits=limits)
    with serve_in_thread(scheduler, tokenizer, **options) as one:
        yield one


@contextmanager
def serve_in_thread(
    scheduler: Scheduler, tokenizer: Any, *, drain_seconds: float = 0.0, **options: Any
) -> Iterator[Running]:
    server = DrainingServer(create_app(scheduler, tokenizer, model=MODEL, **options), drain_seconds=drain_seconds)
    bound = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    one = Running(address_of(bound), scheduler, server, thread)
    yield one
    one.end()


@pytest.fixture(scope="session")
def served_target() -> Target:
    """Without EOS, so that texts are as long as they are asked to be."""
    return Target(tiny_target("llama", vocab_size=4096))


@pytest.fixture(scope="module")
def served(served_target: Target, chat_tokenizer: PreTrainedTokenizerBase) -> Iterator[Running]:
    limits = Limits(max_rows=4, max_length=200, max_waiting=12, max_lanes=2)
    with running(served_target, chat_tokenizer, limits=limits) as one:
        yield one
