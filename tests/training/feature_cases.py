"""What tests of stored features share: rows, and a store of them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
from torch import Tensor

from draftsmith.inference import Target
from draftsmith.training.data.collation import ConversationCollator
from draftsmith.training.features.encoding import TargetStates
from draftsmith.training.features.extraction import Extraction, ExtractionArguments, compute_here
from draftsmith.training.features.sources import OnlineFeatures
from draftsmith.training.features.store import FeatureStore, StoreSettings, name_tensors
from draftsmith.training.features.store_checks import identify_target
from tests.training.run.test_trainer import UNEVEN, make_rows

ROWS = sorted(make_rows(UNEVEN), key=lambda row: len(row["input_ids"]))
COLLATE = ConversationCollator(0)


def make_extraction(
    target: Target, folder: Path, layers: list[int], *, shard_bytes: int = 10**6, **options: Any
) -> Extraction:
    """Of `ROWS`, all of them in one batch unless `batch_size` says otherwise."""
    args = ExtractionArguments(
        output_dir=str(folder), shard_mb=shard_bytes / 10**6, **{"batch_size": len(ROWS), **options}
    )
    settings = StoreSettings(identify_target(target, "tiny"), name_tensors(layers, target.num_layers))
    rows = datasets.Dataset.from_list(ROWS)
    compute = partial(compute_here, target, rows, layers=layers, batch_size=args.batch_size)
    return Extraction(rows, settings, args, compute=compute)


def store_rows(target: Target, folder: Path, layers: list[int], **options: Any) -> FeatureStore:
    make_extraction(target, folder, layers, **options).run()
    return FeatureStore(folder)


def count_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the batch size at every batch that the target computes."""
    sizes: list[int] = []
    compute = OnlineFeatures.__call__

    def counted(self: OnlineFeatures, batch: Mapping[str, Tensor]) -> TargetStates:
        sizes.append(len(batch["input_ids"]))
        return compute(self, batch)

    monkeypatch.setattr(OnlineFeatures, "__call__", counted)
    return sizes
