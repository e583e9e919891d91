"""Messages between rank 0 and the target servers, and their bytes.

A message travels as a pickle of which only known classes are read: messages, and transformers' own logits processors
that keep no state. Nothing else of what is received is looked up or called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
_CLASSES = {(one.__module__, one.__name__): one for one in (Greeting, Prompt, Task, Answer, int, *STATELESS)}


def pack(message: Message) -> bytes:
    """The bytes of a message."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(message)
    return buffer.getvalue()


def unpack(data: bytes | bytearray | memoryview, device: torch.device) -> Message:
    """The message, with its tensors on a device.

    Raises:
        ValueError: this is none.
    """
    try:
        message: Message = _Unpickler(data, device).load()
    except Exception as error:  # whatever such bytes bring about
        raise ValueError(f"a message cannot be read ({error}): install the same packages on all ranks") from error
    return message


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            return _make_tensor, (data.numpy().tobytes(), str(value.dtype).removeprefix("torch."), tuple(value.shape))
        return (int, (int(value),)) if isinstance(value, Integral) else NotImplemented  # numpy's integers


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes | bytearray | memoryview, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _make_tensor.__name__):
            return partial(_make_tensor, device=self._device)
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is not known here")
        return _CLASSES[module, name]


def _make_tensor(data: bytes, dtype: str, shape: tuple[int, ...], *, device: torch.device) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    values = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
    return values.reshape(shape).to(device)
