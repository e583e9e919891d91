"""Packed masks stand for the additive masks that a tree and a prompt had before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.inference import Target
from draftsmith.inference.cache.kv_cache import Span
from draftsmith.inference.kernels.attention import attend_grouped
from draftsmith.inference.kernels.packed_masks import pack_chain, pack_tree, unpack_even_chain, unpack_mask
from draftsmith.inference.targets.masks import TreeMasks, compute_ancestors
from tests.memory_tracker import MemoryTracker
from tests.tiny_targets import SLIDING_WINDOW, random_prompt, tiny_target

ZERO = torch.zeros(1, dtype=torch.long)


def test_the_worked_examples() -> None:
    packed = pack_tree(
        compute_ancestors(torch.tensor([[-1, 0, 0]])),
        torch.tensor([[5]]),
        torch.tensor([[5]]),
        origin=ZERO,
        window=None,
    )
    assert packed.tolist() == [[[[0, 0, 5, 5, 6, 0b001], [0, 0, 5, 5, 7, 0b011], [0, 0, 5, 5, 7, 0b101]]]]
    chain = unpack_even_chain(pack_chain(torch.tensor([[1]]), 2, origin=ZERO, window=None), 4, torch.float32)
    assert (chain == 0).int().tolist() == [[[[1, 1, 1, 0], [1, 1, 0, 0]]]]
    assert chain.untyped_storage().nbytes() == 5 * 4


def random_parents(num_nodes: int, generator: torch.Generator) -> list[int]:
    return [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, num_nodes)]


@pytest.mark.parametrize("num_nodes", [1, 64, 65, 150])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
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


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize(("origin", "length"), [(0, 0), (0, 9), (64, 100)])
def test_a_prompt(window: int | None, origin: int, length: int) -> None:
    packed = pack_chain(torch.tensor([[length]]), 20, origin=ZERO + origin, window=window)
    slots, positions = origin + torch.arange(128), length + torch.arange(20)[:, None]
    seen = (slots <= positions) & (slots > positions - (window or 1000))
    assert torch.equal(unpack_mask(packed, 128, torch.float32)[0, 0] == 0, seen)
    assert torch.equal(unpack_even_chain(packed, 128, torch.float32)[0, 0].flip(0) == 0, seen)


@pytest.mark.parametrize("lengths", [(5,), (140,), (200, 200), (200, 90)])
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
            output = target.prefill(
                target.new_cache(len(lengths), 256),
                ids,
                torch.tensor(lengths),
                feature_layers=(1,),
                chunk_size=chunk_size,
            )
            target.masks = before
            assert output.features is not None
            found.append((output.logits, *(row[:size] for row, size in zip(output.features, lengths, strict=True))))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert SLIDING_WINDOW < 64


def test_what_the_kernels_lack_is_unpacked() -> None:
    """Dropout, as an example."""
    layer = torch.nn.Module()
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8)
    packed = pack_chain(torch.tensor([[2]]), 3, origin=ZERO, window=None)
    mask = unpack_mask(packed, 6, torch.float32)
    torch.manual_seed(0)
    found, _ = attend_grouped(layer, query, key, key, packed, dropout=0.5)
    torch.manual_seed(0)
    expected, _ = attend_grouped(layer, query, key, key, mask, dropout=0.5)
    assert torch.equal(found, expected)


def test_models_that_change_masks_get_additive_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("llama")
    forward = model.base_model.forward
    monkeypatch.setattr(
        model.base_model,
        "forward",
        lambda *args, attention_mask=None, **kwargs: forward(
            *args, attention_mask=None if attention_mask is None else attention_mask.float(), **kwargs
        ),
    )
    assert not Target(model).masks.packs_prompts


def test_a_long_prompt_has_no_mask_of_all_its_slots() -> None:
    """A chunk of 512 tokens after 3,584 others. The dense mask has 512 x 4,096 numbers, 8 MiB."""
    target = Target(tiny_target("llama", max_position_embeddings=4096, num_hidden_layers=1))
    cache = target.new_cache(1, 4096)
    cache.lengths.fill_(3584)
    peaks = []
    for masks in (target.masks, replace(target.masks, packs_prompts=False)):
        target.masks = masks
        with MemoryTracker() as tracker:
            cache.open_slots(512, Span(3584, 3584))
            positions = cache.lengths[:, None] + torch.arange(512)
            target.masks.of_prompts(cache, positions)
        peaks.append(tracker.peak)
    assert peaks[0] < 2**17
    assert peaks[1] > 2**23
