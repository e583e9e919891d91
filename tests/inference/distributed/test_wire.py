"""Messages come through their bytes as they were, and what is no message is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from draftsmith.inference.distributed.gloo_link import Channel
from draftsmith.inference.distributed.messages import Answer, Greeting, Prompt, Task
from draftsmith.inference.distributed.wire import Message, decode, encode

FEATURES = torch.tensor([[1.0, -2.0, 0.5], [0.0, torch.nan, 4.0]])
MESSAGES: dict[str, Message] = {
    "goodbye": None,
    "greeting": Greeting("Llåma", 2, 50, "float32"),
    "prompt": Prompt([7, 8], [0, 7, 8], 5, -(2**63), '["é"]', [2, 4]),
    "greedy prompt": Prompt([7], [7], 5, None),
    "task": Task(1, 4, 5, list(range(9000))),
    "answer": Answer(1, 5, [8, -1], None),
    "answer with features": Answer(1, 5, [8, 9, 7], FEATURES.to(torch.bfloat16).T),
}


def check_same(one: Any, other: Any) -> None:
    """Also of features, which == compares one by one."""
    if isinstance(one, Answer) and one.features is not None:
        torch.testing.assert_close(one.features, other.features, rtol=0, atol=0, equal_nan=True)
        one, other = replace(one, features=None), replace(other, features=None)
    assert one == other


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Channel:
    """A channel whose messages come back to itself."""
    parts: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "isend", lambda part, rank, group: parts.append(part.clone()))
    monkeypatch.setattr(dist, "recv", lambda part, rank, group: part.copy_(parts.pop(0)))
    monkeypatch.setattr(Channel, "__init__", lambda self: setattr(self, "_group", None))
    return Channel()


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_go_through_a_channel(channel: Channel, name: str) -> None:
    channel.send(1, MESSAGES[name])
    check_same(channel.receive(1), MESSAGES[name])


@pytest.mark.parametrize("name", MESSAGES)
def test_no_part_of_a_message_is_read(name: str) -> None:
    data = encode(MESSAGES[name])
    for end in (0, 7, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match="same release"):
            decode(data[:end])


def test_what_cannot_be_read_names_its_sender(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    channel.send(2, Task(1, 4, 5, [7]))
    monkeypatch.setattr("draftsmith.inference.distributed.wire.KINDS", {})
    with pytest.raises(RuntimeError, match=r"rank 2: .*Task.*same release"):
        channel.receive(2)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(Task(1, 4, 5, [7]))
    monkeypatch.setattr("draftsmith.inference.distributed.wire.VERSION", 99)
    with pytest.raises(ValueError, match=r"version 1, .*reads 99.*same release"):
        decode(data)


def test_what_is_too_long_or_lacks_features_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="features of 2 of 3 tokens"):
        decode(encode(Answer(1, 5, [8, 9, 7], FEATURES.T[:2])))
    monkeypatch.setattr("draftsmith.inference.distributed.wire.MAX_BYTES", 10)
    with pytest.raises(ValueError, match=r"Task of .* bytes is too long"):
        encode(Task(1, 4, 5, [7]))


@pytest.mark.parametrize("size", [0, -1, 2**31 + 1, 2**62])
def test_sizes_that_no_message_has_are_refused(channel: Channel, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(dist, "recv", lambda part, rank, group: part.fill_(size))
    with pytest.raises(RuntimeError, match=f"rank 3: .* {size} bytes"):
        channel.receive(3)
