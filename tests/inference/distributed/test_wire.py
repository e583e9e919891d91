"""Frames against bytes written by hand, and what is no frame."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.inference.distributed.gloo_link import FIRST_PART, Channel
from draftsmith.inference.distributed.messages import Answer, Greeting, Prompt, Task
from draftsmith.inference.distributed.wire import DTYPES, HEADER, MAX_BYTES, VERSION, Message, decode, encode, read_size


def frame_of(kind: int, payload: bytes) -> bytes:
    return b"draftmsg" + struct.pack("<3q", VERSION, kind, len(payload)) + payload


def integers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


PROMPT = Prompt([7, 8], [0, 7, 8], 5, -3, '["é"]', (2, 4))
# By hand: a change of these bytes is a new version of the protocol.
FRAMES: dict[str, tuple[Message, bytes]] = {
    "goodbye": (None, frame_of(0, b"")),
    "greeting": (
        Greeting("Llåma", 2, 50, "float32"),
        frame_of(1, integers(6) + b"Ll\xc3\xa5ma" + integers(2, 50, 7) + b"float32"),
    ),
    "prompt": (PROMPT, frame_of(2, integers(2, 7, 8, 3, 0, 7, 8, 5, 1, -3, 6) + b'["\xc3\xa9"]' + integers(2, 2, 4))),
    "greedy prompt": (Prompt([7], [7], 5, None), frame_of(2, integers(1, 7, 1, 7, 5, 0, 2) + b"[]" + integers(0))),
    "task": (Task(1, 4, 5, [7, 8]), frame_of(3, integers(1, 4, 5, 2, 7, 8))),
    "answer": (Answer(1, 5, [8, -1], None), frame_of(4, integers(1, 5, 2, 8, -1, 0))),
    "answer with features": (
        Answer(1, 5, [8, 9], torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 4.0]], dtype=torch.float16)),
        frame_of(4, integers(1, 5, 2, 8, 9, 1, 2, 2, 3) + struct.pack("<6e", 1, -2, 0.5, 0, 3, 4)),
    ),
}


def are_same(one: Any, other: Any) -> bool:
    """Also of features, which == compares one by one."""
    if not (isinstance(one, Answer) and isinstance(other, Answer)) or one.features is None or other.features is None:
        return bool(one == other)
    is_same = one.features.dtype == other.features.dtype and torch.equal(one.features, other.features)
    return is_same and replace(one, features=None) == replace(other, features=None)


@pytest.mark.parametrize("name", FRAMES)
def test_frames_are_these_bytes(name: str) -> None:
    message, frame = FRAMES[name]
    assert bytes(encode(message)) == frame
    assert are_same(decode(bytearray(frame)), message)
    assert read_size(bytearray(frame[: HEADER.size])) == len(frame)


long = st.integers(-(2**63), 2**63 - 1)
ids = st.lists(long, max_size=9)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
tensors = st.tuples(st.integers(1, 3), st.integers(1, 5), st.sampled_from(DTYPES))


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    num_tokens, width, dtype = draw(tensors)
    token_ids = draw(st.lists(long, min_size=num_tokens, max_size=num_tokens))
    features = torch.randn(width, num_tokens).to(dtype).T if draw(st.booleans()) else None
    return Answer(draw(long), draw(long), token_ids, features)


messages: st.SearchStrategy[Message] = st.one_of(
    st.none(),
    st.builds(Greeting, texts, long, long, texts),
    st.builds(Prompt, ids, ids, long, st.none() | long, texts, ids.map(tuple)),
    st.builds(Task, long, long, long, ids),
    answers(),
)


@settings(deadline=None)
@given(messages, st.data())
def test_frames_round_trip_and_no_part_of_one_is_read(message: Message, data: st.DataObject) -> None:
    frame = encode(message)
    assert are_same(decode(frame), message)
    end = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ValueError, match="same release"):
        decode(frame[:end])
    cut = data.draw(st.integers(0, len(frame) - HEADER.size))  # with a header that fits
    if cut:
        kind = HEADER.unpack_from(frame)[2]
        short, long = frame[HEADER.size : len(frame) - cut], frame[HEADER.size :] + b"\0" * cut
        for payload in (short, long):
            with pytest.raises(ValueError, match="same release"):
                decode(bytearray(frame_of(kind, payload)))


def decode_or_error(frame: bytearray) -> Message | ValueError:
    try:
        return decode(frame)
    except ValueError as error:
        return error


@settings(deadline=None)
@given(st.integers(0, 4), st.lists(st.integers(-3, 9) | long, max_size=9), st.binary(max_size=9))
def test_any_payload_is_a_message_or_refused(kind: int, numbers: list[int], rest: bytes) -> None:
    found = decode_or_error(bytearray(frame_of(kind, integers(*numbers) + rest)))
    if isinstance(found, ValueError):
        assert "same release" in str(found)
    else:
        assert kind == 4 or decode(encode(found)) == found  # features may have NaNs


@pytest.mark.parametrize(
    ("header", "received"),
    [
        ((0x80, VERSION, 0, 0), "0x80"),
        ((None, 1, 0, 0), "version 1.* version 2"),
        ((None, VERSION, 5, 0), "kind 5"),
        ((None, VERSION, -1, 0), "kind -1"),
        ((None, VERSION, 3, -8), "-8 bytes"),
        ((None, VERSION, 3, MAX_BYTES + 1), str(MAX_BYTES + 1)),
    ],
)
def test_headers_that_are_refused(header: tuple[int | None, ...], received: str) -> None:
    magic = int.from_bytes(b"draftmsg", "little") if header[0] is None else header[0]
    frame = bytearray(HEADER.pack(magic, *header[1:]))
    for read in (read_size, decode):
        with pytest.raises(ValueError, match=f"{received}.*same release"):
            read(frame)


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Channel:
    """A channel whose messages come back to itself."""
    parts: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "isend", lambda part, rank, group: parts.append(part.clone()))
    monkeypatch.setattr(dist, "recv", lambda part, rank, group: part.copy_(parts.pop(0)))
    monkeypatch.setattr(Channel, "__init__", lambda self: setattr(self, "_group", None))
    return Channel()


def test_messages_of_every_length_go_through_a_channel(channel: Channel) -> None:
    fitting = (FIRST_PART - len(encode(Task(0, 0, 0, [])))) // 8
    for size in (0, 1, fitting - 1, fitting, fitting + 1, 9 * fitting):
        message = Task(1, 2, 3, list(range(size)))
        channel.send(1, message)
        assert channel.receive(1) == message


def test_what_cannot_be_read_names_its_sender(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    channel.send(2, None)
    monkeypatch.setattr("draftsmith.inference.distributed.wire.VERSION", 7)
    with pytest.raises(RuntimeError, match=r"rank 2: .* version 2 .* version 7.*same release"):
        channel.receive(2)


def test_messages_that_are_too_long_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.inference.distributed.wire.MAX_BYTES", 40)
    assert len(encode(Task(0, 0, 0, [1]))) == HEADER.size + 40
    with pytest.raises(ValueError, match="a Task of 48 bytes"):
        encode(Task(0, 0, 0, [1, 2]))
