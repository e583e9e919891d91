"""Stored features on disk: reading, sizes, damage, a full disk."""

from pathlib import Path

import pytest
import torch

from draftsmith.inference import Target
from draftsmith.training.features.store import DiskFullError, FeatureStore
from tests.processes import limited_file_size
from tests.training.feature_cases import ROWS, make_extraction, store_rows


def test_rows_come_back_as_they_were(tmp_path: Path, target: Target) -> None:
    store = store_rows(target, tmp_path, [2], shard_bytes=10**4)
    assert store.num_finished > 1
    for row in ROWS:
        found = store.read(torch.tensor(row["input_ids"]), ["hidden.2", "last"])
        assert found["hidden.2"].shape == found["last"].shape == (len(row["input_ids"]), target.hidden_size)
    assert store.read(torch.tensor(ROWS[0]["input_ids"][1:]), ["last"]) is None


def test_a_shard_that_is_cut_off(target: Target, tmp_path: Path) -> None:
    store_rows(target, tmp_path, [2])
    shard = tmp_path / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"is damaged \(.*\): delete it"):
        FeatureStore(tmp_path)
    shard.unlink()
    assert make_extraction(target, tmp_path, [2]).run() == sum(len(row["input_ids"]) for row in ROWS)
    assert len(FeatureStore(tmp_path)) == len(ROWS)


def test_a_full_disk_leaves_the_finished_shards(target: Target, tmp_path: Path) -> None:
    """The shards' sizes rise with their rows; the first ones fit, the last does not."""
    full = make_extraction(target, tmp_path, [2], shard_bytes=1, batch_size=1)
    sizes = [16 + len(row["input_ids"]) * full.settings.bytes_per_token for row in ROWS]
    assert sizes == sorted(sizes)
    with limited_file_size(sizes[-1]), pytest.raises(DiskFullError, match=r"shard-00004 .*: free some space"):
        full.run()
    assert not list(tmp_path.glob(".*"))
    assert len(FeatureStore(tmp_path)) == len(ROWS) - 1
    assert make_extraction(target, tmp_path, [2], shard_bytes=1, batch_size=1).run() == len(ROWS[-1]["input_ids"])
    assert len(FeatureStore(tmp_path)) == len(ROWS)
