"""Gives the trainer the target's states of a batch: computed, or read from disk.

Legend: B batch, T sequence length, F feature width (number of tapped layers x D), D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from draftsmith.inference.targets.target import Target
from draftsmith.training.data.collation import find_documents
from draftsmith.training.features.encoding import TargetStates, encode
from draftsmith.training.features.store import FeatureStore, name_tensors, tensor_name


class MissingStatesError(ValueError):
    """A batch's states are not stored, or the server does not give them."""


# Gives the target's states of a batch of `draftsmith.training.data.collation`, on the device of the batch.
FeatureSource = Callable[[Mapping[str, Any]], TargetStates]


@dataclass(frozen=True, eq=False)
class OnlineFeatures:
    """Runs the target on every batch and keeps nothing.

    Args:
        num_groups: of documents in a packed batch (`draftsmith.heads.modules.documents.split_documents`).
        with_autograd: let gradients flow from the states into trained weights of the target (adapters).
    """

    target: Target
    feature_layers: Sequence[int]
    num_groups: int | None = None
    with_autograd: bool = False

    def __call__(self, batch: Mapping[str, Any]) -> TargetStates:
        return encode(
            self.target,
            batch["input_ids"],
            batch["attention_mask"],
            feature_layers=self.feature_layers,
            document_ids=find_documents(batch, num_groups=self.num_groups),
            num_groups=self.num_groups,
            with_autograd=self.with_autograd,
            media=batch.get("media"),
        )


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts of a batch, on the host: rows, or the documents packed into them.

    Attributes:
        input_ids: [B, T]. An array, because Trainer and accelerate move tensors to the device.
        places: (row, start, end) of every text.
    """

    input_ids: numpy.typing.NDArray[numpy.int64]
    places: list[tuple[int, int, int]]

    @classmethod
    def find(cls, batch: Mapping[str, Any]) -> Texts:
        documents = find_documents(batch)
        assert documents is not None
        places = []
        for row, marks_T in enumerate(documents.values):
            numbers, counts = torch.unique_consecutive(marks_T, return_counts=True)
            start = 0
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                if number >= 0:
                    places.append((row, start, start + count))
                start += count
        # A copy: a worker that hands the batch over moves its memory.
        return cls(batch["input_ids"].numpy().copy(), places)

    def ids(self, place: tuple[int, int, int]) -> Tensor:
        """The tokens of a text, [T]."""
        row, start, end = place
        return torch.from_numpy(self.input_ids[row, start:end])


@dataclass(frozen=True)
class TextsCollator:
    """Adds the `Texts` of a batch, whose states are read elsewhere."""

    collate: Callable[[Any], dict[str, Any]]

    def __call__(self, rows: Any) -> dict[str, Any]:
        batch = self.collate(rows)
        return {**batch, "texts": Texts.find(batch)}


class ReadFeatures(ABC):
    """Reads the states of every batch; the target does not run.

    A thread reads the next batch that is expected while the current one trains, so two batches of states are in memory.
    Batches of evaluations are not expected, and are read when they are needed.

    Attributes:
        names: of the tensors that `find` gives.
    """

    def __init__(self, target: Target, feature_layers: Sequence[int]) -> None:
        self.target = target
        self.layer_names = [tensor_name(layer, target.num_layers) for layer in feature_layers]
        self.names = name_tensors(feature_layers, target.num_layers)
        self.has_enough = False  # batches are expected: training may take one
        self._expected: deque[Texts] = deque()  # the first one is being read
        self._reading: Future[TargetStates] | None = None

    @abstractmethod
    def find(self, texts: Texts, place: tuple[int, int, int]) -> Mapping[str, Tensor]:
        """The named tensors of a text, each [T, ...] on the host. Called from a thread.

        Raises:
            MissingStatesError: they are missing.
        """

    def expect(self, texts: Texts) -> None:
        """Tells the next batch that will be needed."""
        self._expected.append(texts)
        self.has_enough = len(self._expected) > 1
        self._read_ahead()

    def forget(self) -> None:
        """Drops what is expected: training has ended, perhaps with an error."""
        if self._reading is not None:
            wait([self._reading])
        self._expected.clear()
        self._reading = None

    def __call__(self, batch: Mapping[str, Any]) -> TargetStates:
        texts = batch["texts"]
        if self._expected and texts is self._expected[0]:
            assert self._reading is not None
            states = self._reading.result()
            self._expected.popleft()
            self._reading = None
            self._read_ahead()
        else:
            states = self._gather(texts)
        move = partial(Tensor.to, device=self.target.device, non_blocking=True)
        return TargetStates(move(states.features), move(states.last_hidden))

    def _read_ahead(self) -> None:
        if self._reading is None and self._expected:
            thread = ThreadPoolExecutor(1)  # ends with its work: none is alive when processes are forked
            self._reading = thread.submit(self._gather, self._expected[0])
            thread.shutdown(wait=False)

    def _gather(self, texts: Texts) -> TargetStates:
        """The states of a batch on the host, pinned where the target is on a GPU; zero at padding."""
        pins = self.target.device.type == "cuda"
        shape, width = texts.input_ids.shape, self.target.hidden_size
        zeros = partial(torch.zeros, dtype=self.target.dtype, pin_memory=pins)
        features = zeros(*shape, width * len(self.layer_names))
        last_hidden = zeros(*shape, self.target.state_size or width)
        for place in texts.places:
            found, (row, start, end) = self.find(texts, place), place
            last_hidden[row, start:end] = found["last"]
            for index, name in enumerate(self.layer_names):
                features[row, start:end, index * width : (index + 1) * width] = found[name]
        return TargetStates(features, last_hidden)


def look_ahead(batches: Iterator[Any], source: ReadFeatures) -> Iterator[Any]:
    """Yields the batches; the source is told of each at least one batch before."""
    waiting: deque[Any] = deque()
    for batch in batches:
        source.expect(batch["texts"])
        waiting.append(batch)
        if source.has_enough:
            yield waiting.popleft()
    yield from waiting


class StoredFeatures(ReadFeatures):
    """Reads the states of every batch from a store, where they are found by the hashes of their tokens.

    Args:
        hint: ends the message about a text that is missing.
    """

    def __init__(self, target: Target, feature_layers: Sequence[int], store: FeatureStore, hint: str = "") -> None:
        super().__init__(target, feature_layers)
        self.store, self.hint = store, hint

    def find(self, texts: Texts, place: tuple[int, int, int]) -> Mapping[str, Tensor]:
        found = self.store.read(texts.ids(place), self.names)
        if found is None:
            raise MissingStatesError(
                f"{self.store.folder} lacks a text of this batch: extract the features of this data "
                f"(draftsmith features with the same options){self.hint}"
            )
        return found
