"""Packed masks stand for the additive masks that a tree and a prompt had before."""

from dataclasses import replace

import pytest
import torch

from draftsmith.inference import Target
from draftsmith.inference.cache.kv_cache import Span
from draftsmith.inference.kernels.packed_masks import pack_chain, unpack_even_chain, unpack_mask
from draftsmith.inference.targets.masks import TreeMasks, compute_ancestors
from tests.inference.plain_passes import prefill_in_parts
from tests.tiny_targets import SLIDING_WINDOW, random_prompt, tiny_target

ZERO = torch.zeros(1, dtype=torch.long)


def random_parents(num_nodes: int, generator: torch.Generator) -> list[int]:
    return [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, num_nodes)]


@pytest.mark.parametrize("num_nodes", [64, 150])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_tree_in_the_cache(family: str, num_nodes: int) -> None:
    """Ragged rows, each layer type's window and view: the same mask as `TreeMasks` makes without packing."""
    target = Target(tiny_target(family))
    generator = torch.Generator().manual_seed(num_nodes)
    cache = target.new_cache(3, 512)
    cache.lengths.copy_(torch.tensor([70, 100, 81]))
    cache.open_slots(num_nodes, Span(70, 100))
    ancestors = compute_ancestors(torch.tensor([random_parents(num_nodes, generator) for _ in range(3)]))
    positions = cache.lengths[:, None] + ancestors.sum(-1) - 1
    plain = TreeMasks(target.masks.windows, torch.float32)
    packed, expected = (
        masks if isinstance(masks, dict) else {"only": masks}
        for masks in (
            one.in_view(cache, positions, positions, ancestors) for one in (replace(plain, packs_all=True), plain)
        )
    )
    assert packed.keys() == expected.keys()
    for layer_type, mask in expected.items():
        assert torch.equal(unpack_mask(packed[layer_type], mask.shape[-1], torch.float32), mask)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("origin", "length"), [(0, 0), (0, 9), (64, 100)])
def test_a_prompt(window: int | None, origin: int, length: int) -> None:
    packed = pack_chain(torch.tensor([[length]]), 20, origin=ZERO + origin, window=window)
    slots, positions = origin + torch.arange(128), length + torch.arange(20)[:, None]
    seen = (slots <= positions) & (slots > positions - (window or 1000))
    assert torch.equal(unpack_mask(packed, 128, torch.float32)[0, 0] == 0, seen)
    assert torch.equal(unpack_even_chain(packed, 128, torch.float32)[0, 0].flip(0) == 0, seen)


@pytest.mark.parametrize("lengths", [(140,), (200, 90)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompts_get_the_same_bits(family: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one length, and of several; in one chunk and in chunks of 64."""
    monkeypatch.setattr("draftsmith.inference.targets.masks.FEW_SLOTS", 0)
    target = Target(tiny_target(family))
    assert target.masks.packs_prompts
    ids = random_prompt(max(lengths), batch_size=len(lengths))
    for chunk_size in (512, 64):
        found = []
        for masks in (target.masks, replace(target.masks, packs_prompts=False)):
            target.masks, before = masks, target.masks
            cache, counts = target.new_cache(len(lengths), 256), torch.tensor(lengths)
            logits, features = prefill_in_parts(target, cache, ids, counts, chunk_size, feature_layers=(1,))
            target.masks = before
            found.append((logits, *(row[:size] for row, size in zip(features, lengths, strict=True))))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert SLIDING_WINDOW < 64
