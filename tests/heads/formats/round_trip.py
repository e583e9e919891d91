"""What tests of every format ask: heads come back bit for bit, draft as before, and damage is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads import DraftHeads
from heads.formats.format import Exported, Format
from heads.formats.published import Published, open_published
from inference import Target, generate
from tests.tiny_targets import random_prompt


def write(exported: Exported, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    exported.save(folder)
    return folder


def import_heads(known: Format, published: Published, target: Target) -> DraftHeads:
    return DraftHeads.from_imported(known.read(published, target), target, published.path)


def export_heads(known: Format, heads: DraftHeads) -> Exported:
    assert heads.config.head_type in known.kinds
    return known.write(heads.config, heads.state_dict(), heads.target)


def publish(known: Format, heads: DraftHeads) -> Published:
    """Exported heads as they are opened, without files."""
    exported = export_heads(known, heads)
    return Published(
        "somewhere", exported.config, exported.file, {name: x.detach() for name, x in exported.tensors.items()}
    )


def assert_same_heads(found: DraftHeads, heads: DraftHeads) -> None:
    """The same tensors bit for bit, and the same drafts."""
    expected = heads.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found.state_dict()[name], tensor), name
    prompt = random_prompt(9)
    texts = [generate(heads.target, one, prompt, max_new_tokens=24, do_sample=False) for one in (heads, found)]
    assert torch.equal(texts[0].sequences, texts[1].sequences)
    assert texts[0].stats.accepted_histogram == texts[1].stats.accepted_histogram


def assert_round_trip(known: Format, heads: DraftHeads, folder: Path) -> Published:
    published = open_published(str(write(export_heads(known, heads), folder)))
    assert known.matches(published)
    assert known.matches(open_published(published.path, on_meta=True))
    assert_same_heads(import_heads(known, published, heads.target), heads)
    return published


def damages(name: str, tensor: Tensor) -> list[tuple[str, dict[str, Tensor]]]:
    """Ways to damage a tensor: (how, what takes its place)."""
    ways: list[tuple[str, dict[str, Tensor]]] = [
        ("missing", {}),
        ("renamed", {f"{name}.other": tensor}),
        ("cut", {name: tensor[:-1]}),
    ]
    if tensor.is_floating_point():
        broken = tensor.detach().clone()
        broken.view(-1)[0] = float("nan")
        ways.append(("NaN", {name: broken}))
    if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
        ways.append(("transposed", {name: tensor.T.contiguous()}))
    return ways


def assert_damage_is_named(known: Format, published: Published, target: Target, skip: tuple[str, ...] = ()) -> None:
    """Every tensor, damaged in every way, is refused by its name."""
    for name, tensor in published.items():
        if name in skip:
            continue
        for how, instead in damages(name, tensor):
            tensors = {other: x for other, x in published.items() if other != name} | instead
            damaged = Published(published.path, published.config, published.file, tensors)
            message = refusal_of(known, damaged, target)
            assert name in message, f"{name}, {how}: {message}"


def refusal_of(known: Format, published: Published, target: Target) -> str:
    try:
        import_heads(known, published, target)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{sorted(published)} was read")


def change(published: Published, *, config: dict[str, Any] | None = None, **tensors: Tensor) -> Published:
    """With other keys of the config (None: without), and other tensors."""
    settings = {key: x for key, x in {**published.config, **(config or {})}.items() if x is not None}
    return Published(published.path, settings, published.file, {**published, **tensors})
