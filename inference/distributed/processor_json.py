"""Logits processors as JSON: the name of a known class, and its attributes. What is read runs no code of the sender."""

import json
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.request.processors import PREFIX_FREE
from draftsmith.inference.request.text_processors import READERS

# The processors that run on every node of a tree: they keep no state.
KNOWN: dict[str, type] = {one.__name__: one for one in (*PREFIX_FREE, *READERS)}
INSTEAD = "use draftsmith.generate, or transformers' own processors"


def encode_processors(processors: Sequence[Any]) -> str:
    """The processors as JSON.

    Worked example: `MinLengthLogitsProcessor(7, 2)` is

        ["MinLengthLogitsProcessor", {"min_length": 7, "eos_token_id": ["tensor", ["int64", [1], [2]]]}]

    Raises:
        ValueError: a processor may keep a state, or an attribute is neither a number, a bool, a string, None, a tensor,
            nor a list, tuple, set or dict of those.
    """
    names = {type(one): type(one).__name__ for one in processors}
    if unknown := sorted(name for kind, name in names.items() if KNOWN.get(name) is not kind):
        raise ValueError(
            f"{', '.join(unknown)} may keep a state, and every server sees only a part of the text: {INSTEAD}"
        )
    return json.dumps([[type(one).__name__, _encode_attributes(one)] for one in processors])


def decode_processors(text: str, device: torch.device) -> list[Any]:
    """The processors that `encode_processors` wrote, with their tensors on a device."""
    found = []
    for name, attributes in json.loads(text):
        if name not in KNOWN:
            raise ValueError(f"{name} is not known here: install the same transformers and draftsmith on all ranks")
        processor: Any = object.__new__(KNOWN[name])
        vars(processor).update((key, _decode(value, device)) for key, value in attributes.items())
        found.append(processor)
    return found


def _encode_attributes(processor: Any) -> dict[str, Any]:
    encoded = {}
    for name, value in vars(processor).items():
        try:
            encoded[name] = _encode(value)
        except TypeError as error:
            raise ValueError(
                f"{type(processor).__name__}.{name} holds a value of type {error}, and servers are sent numbers, "
                f"bools, strings, None, tensors, and lists, tuples, sets and dicts of those: {INSTEAD}"
            ) from error
    return encoded


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Integral):  # numpy's, which transformers takes as token ids
        return int(value)
    if isinstance(value, Tensor):
        values = value.detach().flatten().tolist()
        return ["tensor", [str(value.dtype).removeprefix("torch."), list(value.shape), _encode(values)[1]]]
    if isinstance(value, dict):
        return ["dict", [[_encode(key), _encode(held)] for key, held in value.items()]]
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return [name, [_encode(held) for held in value]]
    raise TypeError(type(value).__name__)


def _decode(value: Any, device: torch.device) -> Any:
    if not isinstance(value, list):
        return value
    name, held = value
    if name == "tensor":
        dtype, shape, values = held
        return torch.tensor(values, dtype=getattr(torch, dtype), device=device).reshape(shape)
    if name == "dict":
        return {_decode(key, device): _decode(one, device) for key, one in held}
    return _COLLECTIONS[name](_decode(one, device) for one in held)


_COLLECTIONS: dict[str, type[list[Any] | tuple[Any, ...] | set[Any]]] = {"list": list, "tuple": tuple, "set": set}
