"""Gives the trainer the target's states of a batch: computed, read from disk, or both.

Legend: B batch, T sequence length, F feature width (number of tapped layers x D), D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import TrainerCallback

from inference.targets.encoding import encode
from inference.targets.target import Target
from training.data.collation import find_documents
from training.features.store import (
    DiskFullError,
    FeatureStore,
    StoredRow,
    hash_tokens,
    name_tensors,
    tensor_name,
    write_shard,
)

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 * 10**6  # a hybrid run writes a shard when the states in memory have this size


@dataclass(frozen=True)
class TargetStates:
    """The target's states of a batch, on its device; values at padding are unspecified.

    Attributes:
        features: [B, T, F], the tapped hidden states.
        last_hidden: [B, T, D], after the final norm.
    """

    features: Tensor
    last_hidden: Tensor


# Gives the target's states of a batch of `training.data.collation`, on the device of the batch.
FeatureSource = Callable[[Mapping[str, Tensor]], TargetStates]


@dataclass(frozen=True, eq=False)
class OnlineFeatures:
    """Runs the target on every batch and keeps nothing.

    Args:
        num_groups: of documents in a packed batch (`inference.targets.documents.split_documents`).
        with_autograd: let gradients flow from the states into trained weights of the target (adapters).
    """

    target: Target
    feature_layers: Sequence[int]
    num_groups: int | None = None
    with_autograd: bool = False

    def __call__(self, batch: Mapping[str, Tensor]) -> TargetStates:
        encoded = encode(
            self.target,
            batch["input_ids"],
            batch["attention_mask"],
            feature_layers=self.feature_layers,
            document_ids=find_documents(batch, num_groups=self.num_groups),
            num_groups=self.num_groups,
            with_autograd=self.with_autograd,
        )
        return TargetStates(encoded.features, encoded.last_hidden)


def iterate_documents(batch: Mapping[str, Tensor]) -> Iterator[tuple[int, int, int]]:
    """Yields (row, start, end) of every text of a batch: the row's own, or those packed into it."""
    real = batch["attention_mask"].cpu()
    marks = batch["document_ids"].cpu() if "document_ids" in batch else real - 1
    for row, marks_T in enumerate(marks):
        numbers, counts = torch.unique_consecutive(marks_T, return_counts=True)
        start = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number >= 0:
                yield row, start, start + count
            start += count


@dataclass(frozen=True, eq=False)
class StoredCollator:
    """Adds the stored states of a batch's texts to the batch, in the data-loading processes.

    Each is a tensor [B, T, ...] under `stored.NAME`, viewed as integers: DeepSpeed would round floating-point inputs to
    its own dtype. A batch with a text that is not stored gets none.
    """

    collate: Callable[[Any], dict[str, Tensor]]
    store: FeatureStore
    names: Sequence[str]

    def __call__(self, rows: Any) -> dict[str, Tensor]:
        batch = self.collate(rows)
        stored: dict[str, Tensor] = {}
        for row, start, end in iterate_documents(batch):
            found = self.store.read(batch["input_ids"][row, start:end], self.names)
            if found is None:
                self.store.refresh()  # workers that outlive an epoch would not see the new shards otherwise
                return batch
            for name, value in found.items():
                bits = value.view(torch.int16 if value.itemsize == 2 else torch.int32)
                if name not in stored:
                    stored[name] = bits.new_zeros(*batch["input_ids"].shape, *bits.shape[1:])
                stored[name][row, start:end] = bits
        return batch | {f"stored.{name}": value for name, value in stored.items()}


class StoredFeatures:
    """Reads the states of every batch from a store; the target does not run."""

    def __init__(self, target: Target, feature_layers: Sequence[int], store: FeatureStore) -> None:
        self.target = target
        self.store = store
        self.layer_names = [tensor_name(layer, target.num_layers) for layer in feature_layers]
        self.names = name_tensors(feature_layers, target.num_layers)

    def collator(self, collate: Callable[[Any], dict[str, Tensor]]) -> StoredCollator:
        """Returns the trainer's collator, which reads ahead the states that this source returns."""
        return StoredCollator(collate, self.store, self.names)

    def has(self, batch: Mapping[str, Tensor]) -> bool:
        """Whether the collator found every text of the batch."""
        return f"stored.{self.names[0]}" in batch

    def __call__(self, batch: Mapping[str, Tensor]) -> TargetStates:
        if not self.has(batch):
            raise ValueError(
                f"{self.store.folder} lacks a text of this batch: extract the features of this data "
                "(scripts/extract_features.py with the same options), or train with --feature_mode hybrid"
            )
        states = {name: batch[f"stored.{name}"].view(self.target.dtype) for name in self.names}
        last_hidden = states["last"]
        features = [states[name] for name in self.layer_names] or [last_hidden[..., :0]]
        return TargetStates(torch.cat(features, -1), last_hidden)


class HybridFeatures:
    """Reads stored states, computes the missing ones and stores them, so that the first epoch fills the store.

    A batch with a missing text is computed as a whole, as it would be online, and its missing texts are stored. A kill
    loses the texts of the unfinished shard, which are then computed again. When the disk is full, missing texts are
    computed online in every epoch.

    Args:
        rank: of this process, which writes its own shards, of `shard_bytes` each.
    """

    def __init__(
        self,
        online: OnlineFeatures,
        store: FeatureStore,
        *,
        rank: int = 0,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.online = online
        self.store = store
        self.stored = StoredFeatures(online.target, online.feature_layers, store)
        self.rank = rank
        self.shard_bytes = shard_bytes
        self.writes = True  # until the disk is full
        self._rows: dict[int, StoredRow] = {}
        self._written: set[int] = set()  # keys of flushed rows: the store reads new shards only at an epoch's end
        self._size = 0

    def collator(self, collate: Callable[[Any], dict[str, Tensor]]) -> StoredCollator:
        return self.stored.collator(collate)

    def peek(self, batch: Mapping[str, Tensor]) -> TargetStates:
        """Returns the states of a batch without storing them."""
        return self.stored(batch) if self.stored.has(batch) else self.online(batch)

    def __call__(self, batch: Mapping[str, Tensor]) -> TargetStates:
        states = self.peek(batch)
        if self.writes and not self.stored.has(batch):
            self._keep(batch, states)
        return states

    def _keep(self, batch: Mapping[str, Tensor], states: TargetStates) -> None:
        width = self.online.target.hidden_size
        tensors = {"last": states.last_hidden}
        for index, name in enumerate(self.stored.layer_names):
            tensors[name] = states.features[..., index * width : (index + 1) * width]
        for row, start, end in iterate_documents(batch):
            ids = batch["input_ids"][row, start:end].cpu()
            key = hash_tokens(ids)
            if key in self._rows or key in self._written or self.store.has(ids):
                continue
            values = {name: value[row, start:end].cpu().clone() for name, value in tensors.items()}
            self._rows[key] = StoredRow(ids, values)
            self._size += sum(value.nbytes for value in values.values())
        if self._size >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes the rows in memory as one shard."""
        if not self._rows:
            return
        taken = [
            int(path.stem.rpartition("-")[2]) for path in self.store.folder.glob(f"cache-{self.rank}-*.safetensors")
        ]
        try:
            name = f"cache-{self.rank}-{max(taken, default=-1) + 1:05d}"
            write_shard(self.store.folder, name, list(self._rows.values()))
            self._written |= self._rows.keys()
        except DiskFullError as error:
            logger.warning("%s. Until then, missing states are computed online", error)
            self.writes = False
        self._rows.clear()
        self._size = 0


class FlushFeatures(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Writes the shard of every process at the end of an epoch, so that the next epoch finds all of them, and after an
    evaluation, which may be the last one."""

    def __init__(self, features: HybridFeatures) -> None:
        self.features = features

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.features.flush()
        PartialState().wait_for_everyone()
        self.features.store.refresh()

    on_train_end = on_epoch_end

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.features.flush()
