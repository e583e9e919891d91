"""Checkpoints of the EAGLE family that tests change before they are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.format import Imported
from draftsmith.heads.formats.published import Published
from draftsmith.heads.formats.registry import find_format, recognize
from draftsmith.heads.importing import build_heads
from draftsmith.inference import Target
from tests.heads.tiny_heads import AS_PUBLISHED, tiny_heads

NUM_LAYERS = 8
# Name -> (format, kind, settings) of the checkpoints that are changed here.
CHECKPOINTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle": ("eagle", "eagle", {"fc_bias": True}),
    "eagle3": ("vllm", "eagle3", {"draft_vocab_size": 40, "feature_layers": [1, 4, 6], **AS_PUBLISHED}),
    "full vocabulary": ("eagle", "eagle3", AS_PUBLISHED),
    "speculators": (
        "speculators",
        "eagle3",
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": False},
    ),
    "p-eagle": ("vllm", "parallel", {"draft_vocab_size": 40}),
}


def heads_of(name: str, target: Target) -> DraftHeads:
    _, kind, settings = CHECKPOINTS[name]
    return tiny_heads(kind, target, **settings)


def publish(name: str, target: Target) -> Published:
    """A checkpoint as it would be opened, without files."""
    heads = heads_of(name, target)
    exported = find_format(*CHECKPOINTS[name][:2]).write(heads.config, heads.state_dict(), target)
    config = json.loads(json.dumps(exported.config))
    return Published("somewhere", config, exported.file, dict(exported.tensors))


def change(
    published: Published, tensors: dict[str, Tensor | None] | None = None, config: dict[str, Any] | None = None
) -> Published:
    """With other tensors and keys; None leaves one out."""
    changed: dict[str, Any] = {**published.tensors, **(tensors or {})}
    keys = {**published.config, **(config or {})}
    return Published(
        published.path,
        {key: value for key, value in keys.items() if value is not None},
        published.file,
        {key: value for key, value in changed.items() if value is not None},
    )


def read(published: Published, target: Target) -> tuple[Imported, DraftHeads]:
    found = recognize(published)
    assert found is not None
    imported = found.read(published, target)
    return imported, build_heads(imported, target, published.path)


def refusal(published: Published, target: Target) -> str:
    with pytest.raises(ValueError, match="somewhere cannot be imported:\n  - ") as error:
        read(published, target)
    return str(error.value)
