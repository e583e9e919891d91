"""Messages as bytes: a safetensors file with the format's version, the kind of message and its fields as JSON, and
features beside them. Nothing in it is code."""

import json
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from draftsmith.inference.distributed.messages import Answer, Greeting, Prompt, Task

Message: TypeAlias = Greeting | Prompt | Task | Answer | None

VERSION = 1
MAX_BYTES = 2**31  # of a message; features of 32,768 tokens of a 70B model take 1.6 GB
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Greeting, Prompt, Task, Answer)}


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    fields = {} if message is None else dict(vars(message))
    features = fields.pop("features", None)
    text = json.dumps([VERSION, type(message).__name__, fields]).encode()
    tensors = {"message": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    data = save(tensors if features is None else {**tensors, "features": features.contiguous()})
    if len(data) > MAX_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(data):,} bytes is too long; allowed are {MAX_BYTES:,}")
    return data


def decode(data: bytes) -> Message:
    """The message of some bytes."""
    try:
        tensors = load(data)
        version, kind, fields = json.loads(tensors.pop("message").numpy().tobytes())
        if version != VERSION:
            raise ValueError(f"its format has version {version}, and this side reads {VERSION}")
        message: Message = None if kind == "NoneType" else KINDS[kind](**fields, **tensors)
        features, ids = tensors.get("features"), fields.get("token_ids")
        if features is not None and len(features) != len(ids):
            raise ValueError(f"features of {len(features)} of {len(ids)} tokens")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"a message cannot be read: {error!r}. Install the same release of draftsmith on all ranks"
        ) from error
    return message
