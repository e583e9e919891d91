"""Checkpoints of the EAGLE family that tests change before they are read."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.format import Imported
from draftsmith.heads.formats.published import Published
from draftsmith.heads.formats.registry import find_format, recognize
from draftsmith.heads.importing import build_heads
from draftsmith.inference import Target
from tests.heads.formats.round_trip import publish as publish_heads
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
    return publish_heads(find_format(*CHECKPOINTS[name][:2]), heads_of(name, target))


def read(published: Published, target: Target) -> tuple[Imported, DraftHeads]:
    found = recognize(published)
    assert found is not None
    imported = found.read(published, target)
    return imported, build_heads(imported, target, published.path)


def refusal(published: Published, target: Target) -> str:
    with pytest.raises(ValueError, match="somewhere cannot be imported:\n  - ") as error:
        read(published, target)
    return str(error.value)
