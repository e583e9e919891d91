"""What the trainer needs of the target for a batch, from one place: computed, read from disk, or both.

Legend: B batch, T sequence length, F feature width (number of tapped layers x D), D hidden size, K teacher's best
tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import TrainerCallback

from inference.targets.encoding import encode
from inference.targets.target import Target
from training.data.collation import find_documents
from training.features.store import DiskFullError, FeatureStore, StoredRow, hash_tokens, write_shard
from training.losses.top_logits import TopLogits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetStates:
    """What they hold at padding is unspecified. All are on the target's device.

    features: [B, T, F], the tapped hidden states. last_hidden: [B, T, D], after the final norm; of width 0 where it was
    not stored. top_logits: the teacher, when it was stored: of values [B, T, K]; None = the LM head's logits of
    `last_hidden` are.
    """

    features: Tensor
    last_hidden: Tensor
    top_logits: TopLogits | None = None


class FeatureSource(Protocol):
    """Gives the target's states for a batch of the collator's, on the device of the batch.

    The keys of a batch are `input_ids`, `attention_mask` and `loss_mask`, each [B, T] int64; of a packed one also
    `document_ids` (see `training.data.collation`).
    """

    def __call__(self, batch: Mapping[str, Tensor]) -> TargetStates: ...


class OnlineFeatures:
    """Runs the target on every batch: nothing is kept, and nothing can be stale.

    Args:
        num_groups: of documents, in a packed batch (`inference.targets.documents.split_documents`).
        with_autograd: gradients flow from the states into weights of the target that are trained (adapters).
    """

    def __init__(
        self,
        target: Target,
        feature_layers: Sequence[int],
        *,
        num_groups: int | None = None,
        with_autograd: bool = False,
    ) -> None:
        self.target = target
        self.feature_layers = tuple(feature_layers)
        self.num_groups = num_groups
        self.with_autograd = with_autograd

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


def tensor_name(layer: int, num_layers: int) -> str:
    """What a store calls hidden_states[layer]."""
    return "last" if layer == num_layers else f"hidden.{layer}"


def iterate_documents(batch: Mapping[str, Tensor]) -> Iterator[tuple[int, int, int]]:
    """(row, first slot, slot behind the last) of every text of a batch: a row's own, or those packed into it."""
    real = batch["attention_mask"].cpu()
    marks = batch["document_ids"].cpu() if "document_ids" in batch else real - 1
    for row, marks_T in enumerate(marks):
        numbers, counts = torch.unique_consecutive(marks_T, return_counts=True)
        start = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number >= 0:
                yield row, start, start + count
            start += count


class StoredCollator:
    """Adds the stored states of a batch's texts to it, in the processes that load data (`dataloader_num_workers`).

    Each is a tensor [B, T, ...] under `stored.NAME`, of integers of the same bits: DeepSpeed would round floating-point
    inputs to its own dtype. A batch with a text that is not stored gets none.
    """

    def __init__(self, collate: Callable[[Any], dict[str, Tensor]], store: FeatureStore, names: Sequence[str]) -> None:
        self.collate = collate
        self.store = store
        self.names = list(names)

    def __call__(self, rows: Any) -> dict[str, Tensor]:
        batch = self.collate(rows)
        stored: dict[str, Tensor] = {}
        for row, start, end in iterate_documents(batch):
            found = self.store.read(batch["input_ids"][row, start:end], self.names)
            if found is None:
                self.store.refresh()  # for the next one: workers that outlive an epoch do not see it filled
                return batch
            for name, value in found.items():
                bits = value.view(torch.int16 if value.itemsize == 2 else torch.int32)
                if name not in stored:
                    stored[name] = bits.new_zeros(*batch["input_ids"].shape, *bits.shape[1:])
                stored[name][row, start:end] = bits
        return batch | {f"stored.{name}": value for name, value in stored.items()}


class StoredFeatures:
    """Reads the states of every batch from a store; the target does not run.

    Args:
        target: gives the final norm where states were stored before it.
    """

    def __init__(self, target: Target, feature_layers: Sequence[int], store: FeatureStore) -> None:
        self.target = target
        self.store = store
        self.settings = store.settings
        self.layer_names = [tensor_name(layer, target.num_layers) for layer in feature_layers]
        self.names = sorted({*self.layer_names, *(name for name in self.settings.tensors if "hidden." not in name)})

    def collator(self, collate: Callable[[Any], dict[str, Tensor]]) -> StoredCollator:
        """The trainer's collator: it reads ahead what this source then hands over."""
        return StoredCollator(collate, self.store, self.names)

    def __call__(self, batch: Mapping[str, Tensor]) -> TargetStates:
        if f"stored.{self.names[0]}" not in batch:
            raise ValueError(
                f"{self.store.folder} lacks a text of this batch: extract the features of this data "
                "(scripts/extract_features.py with the same options), or train with --feature_mode hybrid"
            )
        values = {name: self._state(name, batch[f"stored.{name}"]) for name in self.names if "top." not in name}
        features = [values[name] for name in self.layer_names]
        some = features[0] if features else values["last"]
        last_hidden = values.get("last", some[..., :0])
        return TargetStates(torch.cat(features, -1) if features else some[..., :0], last_hidden, self._top(batch))

    def _state(self, name: str, bits: Tensor) -> Tensor:
        state = bits.view(getattr(torch, self.settings.dtype)).to(self.target.dtype)
        if self.settings.tensors[name] == "pre-norm" and name == "last" and self.target.final_norm is not None:
            with torch.no_grad():
                state = self.target.final_norm(state)
        return state

    def _top(self, batch: Mapping[str, Tensor]) -> TopLogits | None:
        if self.settings.teacher_top_k is None:
            return None
        values = batch["stored.top.values"].view(getattr(torch, self.settings.dtype)).to(self.target.dtype)
        sums = batch["stored.top.log_sum_exp"].view(torch.float32)
        return TopLogits(values, batch["stored.top.token_ids"].long(), sums)


class HybridFeatures:
    """Reads what is stored, computes the rest, and stores it: the first epoch fills the store, later ones read it.

    A batch with a text that is not stored is computed as a whole, as it would be online; of its texts only those are
    written that were not yet. They are gathered into shards: a kill loses those of the last one, which are then
    computed again. When the disk is full, the rest is computed online in every epoch.

    Args:
        rank: of this process, which writes shards of its own.
        shard_bytes: states in memory at which a shard is written.
        writes: False: the store stays as it is; what it lacks is computed and not kept.
    """

    def __init__(
        self, online: OnlineFeatures, store: FeatureStore, *, rank: int = 0, shard_bytes: int, writes: bool = True
    ) -> None:
        self.online = online
        self.store = store
        self.stored = StoredFeatures(online.target, online.feature_layers, store)
        self.rank = rank
        self.shard_bytes = shard_bytes
        self.writes = writes
        self._rows: dict[bytes, StoredRow] = {}
        self._written: set[int] = set()  # keys of what was flushed; the store itself is read anew at an epoch's end
        self._size = 0

    def collator(self, collate: Callable[[Any], dict[str, Tensor]]) -> StoredCollator:
        return self.stored.collator(collate)

    def peek(self, batch: Mapping[str, Tensor]) -> TargetStates:
        """The states of a batch; nothing is written."""
        return self.stored(batch) if self._is_stored(batch) else self.online(batch)

    def __call__(self, batch: Mapping[str, Tensor]) -> TargetStates:
        states = self.peek(batch)
        if self.writes and not self._is_stored(batch):
            self._keep(batch, states)
        return states

    def _is_stored(self, batch: Mapping[str, Tensor]) -> bool:
        return f"stored.{self.stored.names[0]}" in batch

    def _keep(self, batch: Mapping[str, Tensor], states: TargetStates) -> None:
        width = self.online.target.hidden_size
        tensors = {"last": states.last_hidden}
        for index, name in enumerate(self.stored.layer_names):
            tensors[name] = states.features[..., index * width : (index + 1) * width]
        for row, start, end in iterate_documents(batch):
            ids = batch["input_ids"][row, start:end].cpu()
            key = ids.numpy().tobytes()
            if key in self._rows or hash_tokens(ids) in self._written or self.store.has(ids):
                continue
            values = {name: value[row, start:end].cpu().clone() for name, value in tensors.items()}
            self._rows[key] = StoredRow(ids, batch["loss_mask"][row, start:end].cpu(), values)
            self._size += sum(value.nbytes for value in values.values())
        if self._size >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes what has gathered as one shard."""
        if self._rows:
            taken = [int(path.stem.rpartition("-")[2]) for path in self.store.folder.glob(f"cache-{self.rank}-*.json")]
            try:
                name = f"cache-{self.rank}-{max(taken, default=-1) + 1:05d}"
                write_shard(self.store.folder, name, list(self._rows.values()))
                self._written |= {hash_tokens(row.input_ids) for row in self._rows.values()}
            except DiskFullError as error:
                logger.warning("%s. Until then, what is missing is computed online", error)
                self.writes = False
            self._rows.clear()
            self._size = 0


class FlushFeatures(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Ends the shard of every process at the end of an epoch, so that the next one finds all of them; and behind an
    evaluation, because it may be the last that there is."""

    def __init__(self, features: HybridFeatures) -> None:
        self.features = features

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.features.flush()
        PartialState().wait_for_everyone()
        self.features.store.refresh()

    on_train_end = on_epoch_end

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.features.flush()
