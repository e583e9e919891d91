"""Rows of a draft in the target's cache: where they stand, what is seen of them, and that the cache stays as it was."""

from __future__ import annotations

import pytest
import torch

from inference.cache.draft_rows import DraftRows
from inference.cache.tree_cache import LayerSpec, PlaneSpec, TreeCache


def make_cache(batch_size: int, capacity: int = 16) -> TreeCache:
    plane = PlaneSpec(2, 4, torch.float32, torch.device("cpu"))
    return TreeCache([LayerSpec(plane, plane)] * 2, batch_size, capacity)


def test_the_worked_example() -> None:
    cache = make_cache(1)
    cache.lengths.fill_(5)
    rows = DraftRows(cache, 4)
    rows.forget_levels(5)
    for width, own, slots, depth in ((1, [0], [5], 0), (2, [1, 2], [6, 7], 1), (1, [3], [8], 2)):
        assert rows.open_level(width).tolist() == own
        assert rows.slots.tolist() == [slots]
        assert rows.depth.tolist() == [depth]
    assert rows.depths.tolist() == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="more than num_scratch=3 frontier nodes"):
        rows.open_level(1)
    rows.forget_levels(5)
    assert rows.open_level(1).tolist() == [0]


def test_rows_follow_each_rows_own_length() -> None:
    cache = make_cache(2)
    rows = DraftRows(cache, 3)
    cache.lengths.copy_(torch.tensor([7, 2]))  # after the rows were made, as in the loop
    rows.forget_levels(7)
    rows.open_level(1)
    rows.open_level(2)
    keys, values = torch.randn(2, 2, 2, 4), torch.randn(2, 2, 2, 4)
    seen = rows.update(keys, values, 1)
    assert seen[0].shape == seen[1].shape == (2, 2, 10, 4)
    for row, length in enumerate((7, 2)):
        assert torch.equal(seen[0][row, :, length + 1 : length + 3], keys[row])
        assert torch.equal(seen[1][row, :, length + 1 : length + 3], values[row])
        written = torch.zeros(10, dtype=torch.bool)
        written[length + 1 : length + 3] = True
        assert torch.equal((seen[0][row] != 0).any(-1).any(0), written)
    slots, places = rows.slots_seen(None)
    assert slots.tolist() == list(range(10))
    assert places.tolist() == [[7, 8, 9], [2, 3, 4]]
    assert cache.lengths.tolist() == [7, 2]
    assert not any(plane.any() for plane in (cache._keys[0], cache._values[0])), "the other layer"


def test_the_view_ends_with_the_cache() -> None:
    rows = DraftRows(make_cache(1, capacity=8), 4)
    rows.forget_levels(6)
    assert rows.get_mask_sizes(1) == (8, 0)
    assert rows.slots_seen(None)[0].tolist() == list(range(8))
