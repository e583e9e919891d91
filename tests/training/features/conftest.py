"""A server of the target's states, for a module's tests."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.training.states_server import LAYERS, StatesServer, serving_states


@pytest.fixture(scope="module")
def running(target_path: Path) -> Iterator[StatesServer]:
    with serving_states(target_path) as server:
        yield server


@pytest.fixture
def server(running: StatesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StatesServer:
    monkeypatch.setattr(openai.OpenAI, "_calculate_retry_timeout", lambda *args: 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    running.reset(tmp_path / "shared", [*LAYERS, 4])
    return running
