"""`save_total_limit`: how many checkpoints a run keeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from training.run.checkpoints import remove_old


@pytest.mark.parametrize("limit", range(1, 7))
@pytest.mark.parametrize("best", [None, 1, 3])
def test_the_newest_stay_and_the_best_one(limit: int, best: int | None, tmp_path: Path) -> None:
    for step in range(1, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (step, step))
        is_known = best is not None and best <= step
        remove_old(tmp_path, save_total_limit=limit, best=str(tmp_path / f"checkpoint-{best}") if is_known else None)
        kept = sorted(int(folder.name.rpartition("-")[2]) for folder in tmp_path.glob("checkpoint-*"))
        number = min(step, max(limit, 2 if is_known and best != step else 1))
        newest = [one for one in range(1, step + 1) if not is_known or one != best]
        rest = number - (1 if is_known else 0)
        assert kept == sorted([*([best] if is_known and best else []), *newest[len(newest) - rest :]])
