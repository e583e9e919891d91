"""Rows of a draft in the target's cache: where they stand. `test_drafter_contract.py` has what is seen of them."""

from __future__ import annotations

import torch

from draftsmith.inference.cache.kv_cache import KVCache, KVSpec, LayerSpec
from draftsmith.inference.cache.shared_rows import SharedRows
from draftsmith.inference.drafters.row_state import TreeRows


def test_the_worked_example() -> None:
    plane = KVSpec(2, 4, torch.float32, torch.device("cpu"))
    cache = KVCache([LayerSpec(plane, plane)] * 2, 1, 16)
    cache.lengths.fill_(5)
    rows, tree = SharedRows(cache, 4), TreeRows(1, 4, torch.device("cpu"))
    for parents, slots, depth in (([[0]], [5], 0), ([[0, 0]], [6, 7], 1), ([[1]], [8], 2)):
        level = tree.open_level(torch.tensor(parents))
        rows.open_level(level.own, level.depth, tree.depths)
        assert rows.slots.tolist() == [slots]
        assert rows.depth.tolist() == [depth]
    assert rows.depths.tolist() == [0, 1, 1, 2]
