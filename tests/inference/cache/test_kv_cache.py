"""What a KVCache holds and shows. `test_target.py` has passes after branching commits."""

import pytest
import torch
from torch import Tensor

from draftsmith.inference.cache.kv_cache import EMPTY, KVCache, KVSpec, LayerSpec, Span
from draftsmith.inference.cache.shared_rows import SharedRows
from draftsmith.inference.drafters.row_state import TreeRows

CPU = torch.device("cpu")
# Two layers as in most models, and one whose keys and values differ in width (MLA) and heads.
NARROW = KVSpec(num_heads=2, width=3, dtype=torch.float32, device=CPU)
WIDE = KVSpec(num_heads=1, width=5, dtype=torch.float64, device=CPU)
LAYERS = (LayerSpec(NARROW, NARROW), LayerSpec(WIDE, NARROW), LayerSpec(NARROW, NARROW))


def write_nodes(cache: KVCache, num_nodes: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """What a model's forward does: every layer appends `num_nodes` random rows [B, H, N, width]."""
    written = []
    for layer, spec in enumerate(LAYERS):
        keys, values = (
            torch.randn(
                cache.batch_size, plane.num_heads, num_nodes, plane.width, generator=generator, dtype=plane.dtype
            )
            for plane in (spec.keys, spec.values)
        )
        seen_keys, seen_values = cache.update(keys, values, layer)
        assert seen_keys.shape == (cache.batch_size, spec.keys.num_heads, cache.view, spec.keys.width)
        assert seen_values.shape == (cache.batch_size, spec.values.num_heads, cache.view, spec.values.width)
        written.append((keys, values))
    return written


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_chain_moves_nothing(batch_size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    counts = torch.tensor([3, 1][:batch_size])
    caches = []
    for is_chain in (True, False):
        cache = KVCache(LAYERS, batch_size, capacity=12)
        cache.open_slots(4, EMPTY)
        write_nodes(cache, 4, generator.manual_seed(2))
        before = [buffer.clone() for buffer in cache._buffers]
        path = torch.arange(3).expand(batch_size, 3) * (torch.arange(3) < counts[:, None])
        cache.commit(path, counts, is_chain=is_chain)
        if is_chain:
            assert all(torch.equal(*pair) for pair in zip(cache._buffers, before, strict=True))
        caches.append(cache)
    for row, count in enumerate(counts.tolist()):
        assert torch.equal(caches[0]._keys[1][row, :, :count], caches[1]._keys[1][row, :, :count])
    assert torch.equal(caches[0].lengths, caches[1].lengths)


def test_the_view_grows_in_steps_and_follows_the_longest_row() -> None:
    cache = KVCache(LAYERS, 2, capacity=100, view_multiple=32)
    for longest, num_nodes, view in ((0, 5, 32), (5, 28, 64), (6, 3, 32), (90, 10, 100)):  # never beyond the capacity
        cache.open_slots(num_nodes, Span(0, longest))
        assert cache.view == view
        assert cache.get_mask_sizes(num_nodes) == (view, 0)
        assert (cache.get_seq_length(), len(cache)) == (longest, 3)


def test_window_layers_see_the_end_of_the_view() -> None:
    windowed = tuple(LayerSpec(NARROW, WIDE, window=window) for window in (None, 8, 3, 8))
    cache = KVCache(windowed, 2, capacity=60, view_multiple=4)
    for buffer in cache._buffers:
        buffer.copy_(torch.rand(buffer.shape, dtype=buffer.dtype))
    # (lengths, longest, shortest) -> the first slot seen with windows of 8 and 3, as in the docstring's example.
    cases = (
        ([0, 0], 0, 0, 0, 0),
        ([12, 9], 13, 2, 0, 0),
        ([12, 11], 13, 11, 4, 8),
        ([30, 21], 30, 21, 12, 16),
        ([30, 22], 30, 22, 12, 20),
        ([54, 0], 54, 54, 44, 52),
    )
    for lengths, longest, shortest, start_of_8, start_of_3 in cases:
        cache.lengths.copy_(torch.tensor(lengths))
        cache.open_slots(5, Span(shortest, longest))
        view = cache.view
        assert cache.slots[:, 0].tolist() == [max(length, shortest) for length in lengths]
        for layer, start in enumerate((0, start_of_8, start_of_3, start_of_8)):
            rows = [torch.rand(2, 2, 5, 3), torch.rand(2, 1, 5, 5, dtype=torch.float64)]
            seen = cache.update(rows[0], rows[1], layer)
            for shown, plane, written in zip(seen, (cache._keys[layer], cache._values[layer]), rows, strict=True):
                assert torch.equal(shown, plane[:, :, start:view])
                assert torch.equal(shown[0, :, cache.slots[0] - start], written[0])
            assert cache.get_mask_sizes(5, layer) == (view - start, start)
            slots, places = cache.slots_seen(windowed[layer].window)
            assert torch.equal(slots, torch.arange(start, view))
            assert torch.equal(slots[places], cache.slots)


@pytest.mark.parametrize("capacity", [11, 30])
def test_rows_are_copied_in_any_order_to_a_cache_of_another_size(capacity: int) -> None:
    generator = torch.Generator().manual_seed(0)
    source = KVCache(LAYERS, 3, capacity=20, view_multiple=4)
    source.open_slots(14, EMPTY)
    written = write_nodes(source, 14, generator)
    source.advance(torch.tensor([12, 3, 9]))
    cache = KVCache(LAYERS, 4, capacity=capacity, view_multiple=4)
    cache.open_slots(6, EMPTY)
    write_nodes(cache, 6, generator)
    cache.advance(torch.full((4,), 6))
    rows, kept = [2, 0, 2, 1], [9, 10, 0, 3]
    lengths = torch.tensor(kept)
    cache.copy_rows(source, torch.tensor(rows), lengths, max_length=10)

    def check(copied: KVCache, origins: list[int], lengths: list[int]) -> None:
        assert copied.lengths.tolist() == lengths
        for layer, (keys, values) in enumerate(written):
            for row, (origin, length) in enumerate(zip(origins, lengths, strict=True)):
                assert torch.equal(copied._keys[layer][row, :, :length], keys[origin, :, :length])
                assert torch.equal(copied._values[layer][row, :, :length], values[origin, :, :length])

    check(cache, rows, kept)
    cache.open_slots(1, Span(0, 10))  # after each row's own length, and in no other cache
    write_nodes(cache, 1, generator)
    cache.advance(torch.ones(4, dtype=torch.long))
    assert lengths.tolist() == kept
    check(source, [0, 1, 2], [12, 3, 9])
    source.copy_rows(source, torch.tensor([2, 0]), torch.tensor([9, 4]), max_length=9)
    check(source, [2, 0], [9, 4])
    source.copy_rows(source, torch.tensor([0, 0]), torch.tensor([8, 4]), max_length=8)
    check(source, [2, 2], [8, 4])


@pytest.mark.parametrize("num_allocated", [2, 4])
def test_added_rows_come_after_the_others(num_allocated: int) -> None:
    """Where a row has left, and beyond the rows that were allocated; the source shares nothing with them."""
    generator = torch.Generator().manual_seed(0)
    cache, source = (KVCache(LAYERS, rows, capacity=20, view_multiple=4) for rows in (num_allocated, 2))
    cache.reset(2)
    cache.open_slots(12, EMPTY)
    own = write_nodes(cache, 12, generator)
    cache.advance(torch.tensor([5, 12]))
    cache.keep_rows([0])
    source.open_slots(7, EMPTY)
    added = write_nodes(source, 7, generator)
    source.advance(torch.tensor([7, 3]))
    cache.add_rows(source, max_length=7)
    source.reset()
    assert cache.lengths.tolist() == [5, 7, 3]
    for layer, (keys, values) in enumerate(added):
        for planes, written in ((cache._keys, keys), (cache._values, values)):
            assert torch.equal(planes[layer][1:, :, :7], written[:, :, :7])
            assert not planes[layer][1:, :, 7:].any(), "what the row that left has written"
    for layer, (keys, values) in enumerate(own):
        assert torch.equal(cache._keys[layer][0, :, :5], keys[0, :, :5])
        assert torch.equal(cache._values[layer][0, :, :5], values[0, :, :5])
    cache.open_slots(1, Span(3, 7))
    write_nodes(cache, 1, generator)
    cache.advance(torch.ones(3, dtype=torch.long))
    assert cache.lengths.tolist() == [6, 8, 4]


def test_buffers_are_zeroed_stacked_and_kept() -> None:
    cache = KVCache(LAYERS, 2, capacity=8)
    assert [tuple(buffer.shape) for buffer in cache._buffers] == [(5, 2, 2, 8, 3), (1, 2, 1, 8, 5)]
    assert all(bool((buffer == 0).all()) for buffer in cache._buffers)
    places = [buffer.data_ptr() for buffer in cache._buffers]
    cache.open_slots(4, EMPTY)
    write_nodes(cache, 4, torch.Generator().manual_seed(0))
    cache.commit(torch.tensor([[0, 2], [0, 1]]), torch.tensor([2, 2]))
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    assert [buffer.data_ptr() for buffer in cache._buffers] == places


def test_reset_zeroes_the_slots_that_were_used_and_no_others() -> None:
    cache = KVCache(LAYERS, 3, capacity=16, view_multiple=4)
    cache.reset(2)
    cache.open_slots(3, EMPTY)  # the view ends at slot 4
    for buffer in cache._all_buffers.values():
        buffer.fill_(1.0)
    cache.keep_rows([1])  # the row that left was used, too
    cache.reset(1)
    for buffer in cache._all_buffers.values():
        assert not buffer[:, :, :, :4].any()
        assert buffer[:, :, :, 4:].all()
    cache.open_slots(16, EMPTY)
    cache.reset()
    assert not any(buffer.any() for buffer in cache._all_buffers.values())


def test_a_cache_made_under_inference_mode_can_be_used_outside() -> None:
    with torch.inference_mode():
        cache = KVCache(LAYERS, 1, capacity=8)
    cache.open_slots(2, EMPTY)
    write_nodes(cache, 2, torch.Generator().manual_seed(0))
    cache.commit(torch.tensor([[0, 1]]), torch.tensor([2]))
    cache.reset()


# Rows of a draft in the cache; `test_drafter_contract.py` has what is seen of them.


def test_the_worked_example() -> None:
    cache = KVCache(LAYERS, 1, 16)
    cache.lengths.fill_(5)
    rows, tree = SharedRows(cache, 4), TreeRows(1, 4, CPU)
    for parents, slots, depth in (([[0]], [5], 0), ([[0, 0]], [6, 7], 1), ([[1]], [8], 2)):
        level = tree.open_level(torch.tensor(parents))
        rows.open_level(level.own, level.depth, tree.depths)
        assert rows.slots.tolist() == [slots]
        assert rows.depth.tolist() == [depth]
    assert rows.depths.tolist() == [0, 1, 1, 2]
