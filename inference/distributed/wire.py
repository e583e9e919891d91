"""Messages as bytes. A frame is a header and a payload; nothing in it is code.

All integers are signed, of 64 bits, little-endian. The header has four: MAGIC, VERSION, the kind of the message (its
place in KINDS), and the number of bytes of the payload. The payload is the message's fields, one after the other, each
as its type says:

    int           it
    str           the number of its bytes in UTF-8, and they
    list, tuple   the number of its integers, and they
    Tensor        its place in DTYPES, its two sizes, and its raw bytes
    X | None      0, or 1 and X
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import Any, TypeAlias, get_args, get_type_hints

import torch
from torch import Tensor

from draftsmith.inference.distributed.messages import Answer, Greeting, Prompt, Task

Message: TypeAlias = Greeting | Prompt | Task | Answer | None
Buffer: TypeAlias = bytearray | memoryview

MAGIC = int.from_bytes(b"draftmsg", "little")
VERSION = 2  # raise it when a byte of any frame changes its meaning
HEADER = struct.Struct("<4q")
MAX_BYTES = 1 << 30  # of a payload: features of a thousand tokens are some 50 MB
KINDS: tuple[type, ...] = (NoneType, Greeting, Prompt, Task, Answer)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def encode(message: Message) -> bytearray:
    """The frame of a message.

    Worked example: `Task(version=1, keep=4, start=5, token_ids=[7, 8])` is ten integers:

        MAGIC, VERSION, 3, 48,  1, 4, 5, 2,  7, 8

    Raises:
        ValueError: it is too long.
    """
    kind: Any = type(message)
    parts = (part for name, type_ in _list_fields(kind) for part in _pack(type_, getattr(message, name)))
    payload = b"".join(parts)
    if len(payload) > MAX_BYTES:
        raise ValueError(f"a {kind.__name__} of {len(payload)} bytes is too long: at most {MAX_BYTES} go")
    return bytearray(HEADER.pack(MAGIC, VERSION, KINDS.index(kind), len(payload)) + payload)


def read_size(begin: Buffer) -> int:
    """The bytes of a frame, header included, from its first `HEADER.size` bytes or more.

    Raises:
        ValueError: this is no frame, or one of another version.
    """
    return HEADER.size + _read_header(begin)[1]


def decode(frame: Buffer) -> Message:
    """The message of a whole frame. Features share the frame's memory.

    Raises:
        ValueError: this is no frame, one of another version, or one that is too short or too long.
    """
    kind, size = _read_header(frame)
    if size != len(frame) - HEADER.size:
        raise _unreadable(f"its header says {size} bytes, and {len(frame) - HEADER.size} follow")
    payload = _Payload(memoryview(frame)[HEADER.size :])
    message: Message = KINDS[kind](**{name: payload.read(type_) for name, type_ in _list_fields(KINDS[kind])})
    payload.end()
    if isinstance(message, Answer) and message.features is not None and len(message.features) != len(message.token_ids):
        raise _unreadable(f"it has features of {len(message.features)} of {len(message.token_ids)} tokens")
    return message


@cache
def _list_fields(kind: type) -> list[tuple[str, Any]]:
    if kind is NoneType:
        return []
    types = get_type_hints(kind)
    return [(field.name, types[field.name]) for field in fields(kind)]


def _read_header(begin: Buffer) -> tuple[int, int]:
    """The kind of the message, and the bytes of its payload."""
    if len(begin) < HEADER.size:
        raise _unreadable(f"it has {len(begin)} bytes, and a header has {HEADER.size}")
    magic, version, kind, size = HEADER.unpack_from(begin)
    if magic != MAGIC:
        raise _unreadable(f"it begins with {magic:#x}, and messages of draftsmith with {MAGIC:#x}")
    if version != VERSION:
        raise _unreadable(f"it has version {version} of the protocol, and this side has version {VERSION}")
    if not 0 <= kind < len(KINDS):
        raise _unreadable(f"it has kind {kind}, and kinds are 0 to {len(KINDS) - 1}")
    if not 0 <= size <= MAX_BYTES:
        raise _unreadable(f"its payload has {size} bytes, and 0 to {MAX_BYTES} are allowed")
    return kind, size


def _unreadable(reason: str) -> ValueError:
    return ValueError(f"a message cannot be read: {reason}. Install the same release of draftsmith on all ranks")


def _pack(type_: Any, value: Any) -> Iterator[bytes]:
    if type_ is int:
        yield struct.pack("<q", value)
    elif type_ is str:
        data = value.encode()
        yield from (struct.pack("<q", len(data)), data)
    elif type_ is Tensor:
        yield struct.pack("<3q", DTYPES.index(value.dtype), *value.shape)
        # numpy does not have bfloat16.
        yield (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy().tobytes()
    elif NoneType in get_args(type_):
        yield struct.pack("<q", value is not None)
        if value is not None:
            yield from _pack(get_args(type_)[0], value)
    else:
        yield struct.pack(f"<{1 + len(value)}q", len(value), *value)


class _Payload:
    """Takes a payload apart, from its beginning to its end."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._place = data, 0

    def read(self, type_: Any) -> Any:
        """The next field, of this type."""
        if type_ is int:
            return self._unpack("<q")[0]
        if type_ is str:
            try:
                return str(self._take(self.read(int)), "utf-8")
            except UnicodeDecodeError as error:
                raise _unreadable(f"a text of it is no UTF-8 ({error.reason})") from error
        if type_ is Tensor:
            code, *shape = self._unpack("<3q")
            if not 0 <= code < len(DTYPES) or min(shape) < 1:
                raise _unreadable(f"its features have dtype {code} of 0 to {len(DTYPES) - 1} and shape {shape}")
            data = self._take(shape[0] * shape[1] * DTYPES[code].itemsize)
            return torch.frombuffer(data, dtype=DTYPES[code]).reshape(shape)
        count = self.read(int)
        if NoneType not in get_args(type_):
            self._check(8 * count)
            return (tuple if type_ == tuple[int, ...] else list)(self._unpack(f"<{count}q"))
        if count not in (0, 1):
            raise _unreadable(f"it has {count} where 0 or 1 is due")
        return self.read(get_args(type_)[0]) if count else None

    def _check(self, size: int) -> None:
        left = len(self._data) - self._place
        if not 0 <= size <= left:
            raise _unreadable(f"{size} bytes are due and {left} are left")

    def _take(self, size: int) -> memoryview:
        self._check(size)
        self._place += size
        return self._data[self._place - size : self._place]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def end(self) -> None:
        if left := len(self._data) - self._place:
            raise _unreadable(f"{left} bytes are left over")
