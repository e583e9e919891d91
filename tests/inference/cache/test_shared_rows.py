"""Rows of a draft in the target's cache: where they stand. `test_drafter_contract.py` has what is seen of them."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference.cache.kv_cache import KVCache, KVSpec, LayerSpec
from draftsmith.inference.cache.shared_rows import SharedRows


def test_the_worked_example() -> None:
    plane = KVSpec(2, 4, torch.float32, torch.device("cpu"))
    cache = KVCache([LayerSpec(plane, plane)] * 2, 1, 16)
    cache.lengths.fill_(5)
    rows = SharedRows(cache, 4)
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
