"""Messages as bytes. A frame is a header and a payload; nothing in it is code.

All integers are signed, of 64 bits, little-endian. The header has four: MAGIC, VERSION, the kind of the message, and
the number of bytes of the payload. The payloads, where "n ids" are n integers:

    0 None      nothing
    1 Greeting  layers, vocabulary, bytes of model, bytes of dtype; model, dtype (UTF-8)
    2 Prompt    tokens, shown tokens, max_new, is_seeded, row_seed, layers, bytes of processors;
                tokens ids, shown ids, feature layers, processors (JSON in UTF-8)
    3 Task      version, keep, start, tokens; tokens ids
    4 Answer    version, start, tokens, dtype, features F, seconds (float64); tokens ids, features [tokens, F]

The dtype of features is 0 where there are none, else one more than its place in DTYPES. They are raw bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from draftsmith.inference.distributed.messages import Answer, Greeting, Prompt, Task

Message: TypeAlias = Greeting | Prompt | Task | Answer | None
Buffer: TypeAlias = bytearray | memoryview

MAGIC = int.from_bytes(b"draftmsg", "little")
VERSION = 1  # raise it when a byte of any frame changes its meaning
HEADER = struct.Struct("<4q")
MAX_BYTES = 1 << 30  # of a payload: features of a thousand tokens are some 50 MB
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def encode(message: Message) -> bytearray:
    """The frame of a message.

    Worked example: `Task(version=1, keep=4, start=5, token_ids=[7, 8])` is ten integers:

        MAGIC, VERSION, 3, 48,  1, 4, 5, 2,  7, 8

    Raises:
        ValueError: it is too long.
    """
    kind = _KIND_OF[type(message)]
    _, pack, _ = _KINDS[kind]
    payload = b"".join(pack(message))
    if len(payload) > MAX_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(payload)} bytes is too long: at most {MAX_BYTES} go")
    return bytearray(HEADER.pack(MAGIC, VERSION, kind, len(payload)) + payload)


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
    _, _, read = _KINDS[kind]
    message: Message = read(payload)
    payload.end()
    return message


def _read_header(begin: Buffer) -> tuple[int, int]:
    """The kind of the message, and the bytes of its payload."""
    if len(begin) < HEADER.size:
        raise _unreadable(f"it has {len(begin)} bytes, and a header has {HEADER.size}")
    magic, version, kind, size = HEADER.unpack_from(begin)
    if magic != MAGIC:
        raise _unreadable(f"it begins with {magic:#x}, and messages of draftsmith with {MAGIC:#x}")
    if version != VERSION:
        raise _unreadable(f"it has version {version} of the protocol, and this side has version {VERSION}")
    if not 0 <= kind < len(_KINDS):
        raise _unreadable(f"it has kind {kind}, and kinds are 0 to {len(_KINDS) - 1}")
    if not 0 <= size <= MAX_BYTES:
        raise _unreadable(f"its payload has {size} bytes, and 0 to {MAX_BYTES} are allowed")
    return kind, size


def _unreadable(reason: str) -> ValueError:
    return ValueError(f"a message cannot be read: {reason}. Install the same release of draftsmith on all ranks")


class _Payload:
    """Takes a payload apart, from its beginning to its end."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._place = data, 0

    def take(self, size: int) -> memoryview:
        place = self._place
        left = len(self._data) - place
        if not 0 <= size <= left:
            raise _unreadable(f"{size} bytes are due and {left} are left")
        self._place = place + size
        return self._data[place : place + size]

    def numbers(self, numbers: struct.Struct) -> tuple[Any, ...]:
        return numbers.unpack(self.take(numbers.size))

    def integers(self, count: int) -> list[int]:
        return list(struct.unpack(f"<{count}q", self.take(8 * count)))

    def text(self, size: int) -> str:
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError as error:
            raise _unreadable(f"a text of it is no UTF-8 ({error.reason})") from error

    def end(self) -> None:
        if left := len(self._data) - self._place:
            raise _unreadable(f"{left} bytes are left over")


def _pack_integers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _pack_greeting(greeting: Greeting) -> Sequence[bytes]:
    model, dtype = greeting.model.encode(), greeting.dtype.encode()
    return _GREETING.pack(greeting.num_layers, greeting.vocab_size, len(model), len(dtype)), model, dtype


def _read_greeting(payload: _Payload) -> Greeting:
    num_layers, vocab_size, model, dtype = payload.numbers(_GREETING)
    return Greeting(payload.text(model), num_layers, vocab_size, payload.text(dtype))


def _pack_prompt(prompt: Prompt) -> Sequence[bytes]:
    token_ids, shown, layers = prompt.token_ids, prompt.shown, prompt.feature_layers
    processors, seed = prompt.processors.encode(), prompt.row_seed
    lengths = (len(token_ids), len(shown), prompt.max_new, seed is not None, seed or 0, len(layers), len(processors))
    return _PROMPT.pack(*lengths), _pack_integers(*token_ids, *shown, *layers), processors


def _read_prompt(payload: _Payload) -> Prompt:
    num_tokens, num_shown, max_new, is_seeded, seed, num_layers, num_bytes = payload.numbers(_PROMPT)
    token_ids, shown, layers = (payload.integers(count) for count in (num_tokens, num_shown, num_layers))
    row_seed = seed if is_seeded else None
    return Prompt(token_ids, shown, max_new, row_seed, payload.text(num_bytes), tuple(layers))


def _pack_task(task: Task) -> Sequence[bytes]:
    return (_pack_integers(task.version, task.keep, task.start, len(task.token_ids), *task.token_ids),)


def _read_task(payload: _Payload) -> Task:
    version, keep, start, num_tokens = payload.numbers(_TASK)
    return Task(version, keep, start, payload.integers(num_tokens))


def _pack_answer(answer: Answer) -> Sequence[bytes]:
    features, dtype, width, data = answer.features, 0, 0, b""
    if features is not None:
        dtype, width = 1 + DTYPES.index(features.dtype), features.shape[1]
        if features.dtype == torch.bfloat16:  # which numpy does not have
            features = features.view(torch.int16)
        data = features.numpy().tobytes()
    numbers = _ANSWER.pack(answer.version, answer.start, len(answer.token_ids), dtype, width, answer.seconds)
    return numbers, _pack_integers(*answer.token_ids), data


def _read_answer(payload: _Payload) -> Answer:
    version, start, num_tokens, code, width, seconds = payload.numbers(_ANSWER)
    if not 0 <= code <= len(DTYPES) or (code and min(num_tokens, width) < 1):
        raise _unreadable(f"its features have dtype {code} of 0 to {len(DTYPES)} and shape [{num_tokens}, {width}]")
    token_ids, features = payload.integers(num_tokens), None
    if code:
        dtype = DTYPES[code - 1]
        data = payload.take(num_tokens * width * dtype.itemsize)
        features = torch.frombuffer(data, dtype=dtype).reshape(num_tokens, width)
    return Answer(version, start, token_ids, features, seconds)


_GREETING, _PROMPT, _TASK, _ANSWER = (struct.Struct(layout) for layout in ("<4q", "<7q", "<4q", "<5qd"))

# The kind of a message is its place here.
_KINDS: tuple[tuple[type, Callable[[Any], Sequence[bytes]], Callable[[_Payload], Any]], ...] = (
    (type(None), lambda message: (), lambda payload: None),
    (Greeting, _pack_greeting, _read_greeting),
    (Prompt, _pack_prompt, _read_prompt),
    (Task, _pack_task, _read_task),
    (Answer, _pack_answer, _read_answer),
)
_KIND_OF = {one[0]: kind for kind, one in enumerate(_KINDS)}
