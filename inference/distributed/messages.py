"""Messages between rank 0 and the target servers, and their bytes.

A message travels as data: the names and attributes of known classes, which are messages, and transformers' own logits
processors that keep no state. No code of the sender is run.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.request.processors import PREFIX_FREE
from draftsmith.inference.request.request import Request
from draftsmith.inference.request.text_processors import READERS, read_processors
from draftsmith.inference.request.token_history import TokenHistory
from draftsmith.inference.targets.target import Target


@dataclass(frozen=True)
class Greeting:
    """What a server says first: its model, and the release of draftsmith."""

    model: str
    num_layers: int
    vocab_size: int
    dtype: str
    release: str

    @classmethod
    def of_target(cls, target: Target) -> Greeting:
        dtype = str(target.dtype).removeprefix("torch.")
        name = type(target.model).__name__
        return cls(name, target.num_layers, target.vocab_size, dtype, version("draftsmith"))


@dataclass(frozen=True)
class Prompt:
    """Begins a text: the server reads the prompt. There is no answer.

    Attributes:
        token_ids: the prompt; shown: the same as processors see it, padding on the left included.
        max_new: the most new tokens.
        row_seed: of the noise; None = greedy.
        processors: transformers' logits processors.
        feature_layers: hidden states that answers contain.
    """

    token_ids: list[int]
    shown: list[int]
    max_new: int
    row_seed: int | None
    processors: tuple[Any, ...] = ()
    feature_layers: tuple[int, ...] = ()

    @classmethod
    def of_request(cls, request: Request, row_seed: int | None, feature_layers: Sequence[int]) -> Prompt:
        """The prompt of a request of one row.

        Raises:
            ValueError: a processor may keep a state.
        """
        if unknown := sorted({type(one).__name__ for one in request.processors if type(one) not in STATELESS}):
            raise ValueError(
                f"{', '.join(unknown)} may keep a state, and every server sees only a part of the text: use "
                "draftsmith.generate, or transformers' own processors"
            )
        (prompt,), (row,) = request.prompts, request.rows
        layers, processors = tuple(feature_layers), tuple(request.processors)
        return cls(prompt, row.padded, max(1, row.budget), row_seed, processors, layers)

    @property
    def num_hidden(self) -> int:
        """Padding before the prompt, which only processors see."""
        return len(self.shown) - len(self.token_ids)

    def make_sampler(self, target: Target, capacity: int) -> Sampler:
        """How the target picks its tokens, on rank 0 and on servers; the texts that processors read have room for
        `capacity` tokens and the padding.

        Raises:
            ValueError: a processor biases tokens that the target does not have.
        """
        texts, processors = None, list(self.processors)
        if any(type(processor) not in PREFIX_FREE for processor in processors):
            shown = torch.tensor([self.shown], device=target.device)
            texts = TokenHistory.of_prompts(shown, [self.max_new], self.num_hidden + capacity)
            processors = read_processors(processors, texts, target.vocab_size)
        seeds = None if self.row_seed is None else torch.tensor([self.row_seed], device=target.device)
        return Sampler(processors, do_sample=seeds is not None, row_seeds=seeds, texts=texts)


@dataclass(frozen=True)
class Task:
    """Asks for the target's next token after every position from `start` on.

    Worked example, the server holds the 7 tokens a b c d x y z, and the text is a b c d e f with the drafts g h:

        Task(version, keep=4, start=5, token_ids=[e, f, g, h])    cut to 4 tokens; which tokens follow f, g and h?

    Attributes:
        keep: the length to which the server cuts its cache.
        token_ids: all tokens from position `keep` on.
    """

    version: int
    keep: int
    start: int
    token_ids: list[int]

    @property
    def num_asked(self) -> int:
        return self.keep + len(self.token_ids) - self.start


@dataclass(frozen=True)
class Answer:
    """The target's next token after each position from `start` on.

    Attributes:
        features: [n, F] the target's features of these positions, on the host, or None.
    """

    version: int
    start: int
    token_ids: list[int]
    features: Tensor | None = None


Message: TypeAlias = Greeting | Prompt | Task | Answer | None
STATELESS: tuple[type, ...] = (*PREFIX_FREE, *READERS)
_CLASSES = {one.__name__: one for one in (Greeting, Prompt, Task, Answer, *STATELESS)}
_COLLECTIONS: dict[str, type[list[Any] | tuple[Any, ...] | set[Any]]] = {"list": list, "tuple": tuple, "set": set}
_SIZE = 8  # bytes of the size of a message's text


def pack(message: Message) -> bytes:
    """The bytes of a message: the size of a JSON text, the text, and the tensors' bytes.

    Raises:
        ValueError: a processor holds what cannot be sent.
    """
    tensors: list[bytes] = []
    text = json.dumps(_encode(message, tensors)).encode()
    return b"".join([len(text).to_bytes(_SIZE, "little"), text, *tensors])


def unpack(data: bytes | bytearray | memoryview, device: torch.device) -> Message:
    """The message, with its tensors on a device.

    Raises:
        ValueError: this is none.
    """
    try:
        stream = io.BytesIO(data)
        size = int.from_bytes(stream.read(_SIZE), "little")
        message: Message = _decode(json.loads(stream.read(size)), stream, device)
    except Exception as error:  # whatever such bytes bring about
        raise ValueError(f"a message cannot be read ({error}): install the same packages on all ranks") from error
    return message


def _encode(value: Any, tensors: list[bytes]) -> Any:
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, Integral):  # numpy's, too
        return int(value)
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return ["tensor", [str(value.dtype).removeprefix("torch."), list(value.shape)]]
    if isinstance(value, dict):
        return ["dict", [[_encode(key, tensors), _encode(one, tensors)] for key, one in value.items()]]
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return [name, [_encode(one, tensors) for one in value]]
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value):
        raise ValueError(f"a {name} cannot be sent to servers: use draftsmith.generate")
    return [name, [[key, _encode(one, tensors)] for key, one in vars(value).items()]]


def _decode(value: Any, stream: io.BytesIO, device: torch.device) -> Any:
    if not isinstance(value, list):
        return value
    name, held = value
    if name == "tensor":
        kind: torch.dtype = getattr(torch, held[0])
        data = bytearray(stream.read(math.prod(held[1]) * kind.itemsize))
        return (torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)).reshape(held[1]).to(device)
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](_decode(one, stream, device) for one in held)
    pairs = [(_decode(key, stream, device), _decode(one, stream, device)) for key, one in held]
    if name == "dict":
        return dict(pairs)
    found: Any = object.__new__(_CLASSES[name])
    vars(found).update(pairs)
    return found
