"""Messages as bytes: a safetensors file with the message's fields as JSON, and features beside them. Nothing in it is
code."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from draftsmith.inference.distributed.messages import Answer, Greeting, Prompt, Task

Message: TypeAlias = Greeting | Prompt | Task | Answer | None

KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Greeting, Prompt, Task, Answer)}


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    fields = {} if message is None else dict(vars(message))
    features = fields.pop("features", None)
    text = json.dumps([type(message).__name__, fields]).encode()
    tensors = {"message": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    return save(tensors if features is None else {**tensors, "features": features.contiguous()})


def decode(data: bytes) -> Message:
    """The message of some bytes."""
    try:
        tensors = load(data)
        kind, fields = json.loads(tensors.pop("message").numpy().tobytes())
        message: Message = None if kind == "NoneType" else KINDS[kind](**fields, **tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"a message cannot be read: {error!r}. Install the same release of draftsmith on all ranks"
        ) from error
    return message
