"""The states of a target that runs in a vLLM server, for an extraction or for a training run.

Only the target's first layers, its final norm and its LM head are here, for the last state and for the checks.

Legend: T tokens of a row, L states of each token, D hidden size, K best tokens, V target vocabulary.
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads.adapter import find_adapter_of
from draftsmith.training.endpoint.hidden_states import HiddenStates, discard_file
from draftsmith.training.features.encoding import TargetStates
from draftsmith.training.features.self_check import LOG_PROB_TOLERANCE, NUM_BEST, NUM_TOKENS, STATE_TOLERANCE
from draftsmith.training.features.sources import MissingStatesError, ReadFeatures, Texts
from draftsmith.training.features.store import FeatureStore, StoredRow, name_tensors, tensor_name
from draftsmith.training.features.target_loading import FirstLayers
from draftsmith.training.features.target_options import EndpointArguments, ModelArguments, PlacementArguments

logger = logging.getLogger(__name__)

NUM_LAYERS = 3  # layers to load: EAGLE-3 taps the input of the third one, which can then be checked


class EndpointStates:
    """Reads the states of rows from a server, several rows at a time.

    Args:
        url: of the server.
        layers: the hidden states to give, besides the last.
        target_name: as --target gives it.
        max_length: tokens of the longest text.

    Raises:
        ConnectionError: no server.
        ValueError: the server has another model, or does not take the longest row.
    """

    def __init__(
        self,
        target: FirstLayers,
        args: EndpointArguments,
        *,
        url: str,
        layers: Sequence[int],
        target_name: str,
        max_length: int,
    ) -> None:
        self.target, self.num_in_flight = target, args.concurrency
        self.names = name_tensors(layers, target.num_layers)
        self.layers = sorted({*layers, target.num_layers})
        self.server = HiddenStates(
            url=url,
            target=target_name,
            served_name=args.endpoint_model or target_name,
            layers=self.layers,
            hidden_size=target.hidden_size,
            dtype=target.dtype,
            max_length=max_length,
            length_limit=target.max_length,
            folder=args.shared_folder,
        )

    def read_rows(self, rows: Any, shards: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int, StoredRow]]:
        """Yields (shard, row number, row) in order; requests run ahead, also into later shards.

        Args:
            rows: with a column `input_ids`.
        """
        waiting: deque[tuple[int, int, Future[StoredRow]]] = deque()
        pool = ThreadPoolExecutor(self.num_in_flight)
        try:
            for shard, index in ((shard, index) for shard, indices in shards.items() for index in indices):
                waiting.append((shard, index, pool.submit(self.read, torch.tensor(rows[index]["input_ids"]))))
                if len(waiting) == self.num_in_flight:
                    yield _take_first(waiting)
            while waiting:
                yield _take_first(waiting)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def read(self, input_ids: Tensor) -> StoredRow:
        """Asks for the states of one row's ids [T]."""
        return self.take(self.server.ask(input_ids)[0], input_ids)

    def take(self, path: Path, input_ids: Tensor) -> StoredRow:
        """Reads the server's answer for one row's ids [T], and deletes it."""
        states_TLD = self.server.take(path, input_ids)
        tensors = {tensor_name(layer, self.target.num_layers): states_TLD[:, i] for i, layer in enumerate(self.layers)}
        tensors["last"] = self.target.apply_final_norm(states_TLD[:, -1])
        return StoredRow(input_ids, {name: tensors[name] for name in self.names})

    def check_target(self, input_ids: Tensor) -> None:
        """Compares the server with the target here, by the first tokens of a text's ids [T].

        Raises:
            ValueError: another model or other states; gives the difference.
        """
        ids = input_ids[:NUM_TOKENS]
        path, answer = self.server.ask(ids, prompt_logprobs=NUM_BEST)
        row = self.take(path, ids)
        self._compare(row, self._run_first_layers(ids), "those of the same layers here")
        difference = self._compare_log_probs(row.tensors["last"], answer)
        logger.info(
            "self-check: log-probabilities from the states differ by %.2g at most from the server's", difference
        )

    def check_stored(self, folder: Path, input_ids: Tensor) -> None:
        """Raises ValueError when the store has other states of a text's ids [T] than the server gives now."""
        if (stored := FeatureStore(folder).read(input_ids, self.names)) is not None:
            self._compare(self.read(input_ids), stored, f"those in {folder}")

    @torch.no_grad()
    def _run_first_layers(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Those states of `names` that the layers here can compute, each [T, D]."""
        output = self.target.model(input_ids=input_ids[None], output_hidden_states=True, use_cache=False)
        is_whole = self.target.num_loaded == self.target.num_layers
        numbers = range(self.target.num_loaded + is_whole)  # the last one of an incomplete model is normed
        found = {tensor_name(layer, self.target.num_layers): output.hidden_states[layer][0] for layer in numbers}
        return {name: value for name, value in found.items() if name in self.names}

    def _compare(self, row: StoredRow, wanted: Mapping[str, Tensor], source: str) -> None:
        tolerance = STATE_TOLERANCE[self.target.dtype]
        for name, states in wanted.items():
            found, expected = row.tensors[name].float(), states.float()
            difference = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
            if not difference <= tolerance:
                raise ValueError(
                    f"the server's states {name} differ from {source} by {difference:.3g} of their length (allowed "
                    f"{tolerance:g}): the server has other weights, or numbers its layers in another way"
                )

    def _compare_log_probs(self, last: Tensor, answer: Mapping[str, Any]) -> float:
        """Compares the distribution that follows from the last states [T, D] with the server's K best tokens."""
        try:
            scores = answer["choices"][0]["prompt_logprobs"][1:]  # of the tokens after the first
            best = [{int(key): value["logprob"] for key, value in at.items()} for at in scores]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise self.server.client.misread(answer) from None
        log_probs = self.target.compute_logits(last).float().log_softmax(-1)  # [T, V]
        difference = max(
            (abs(float(log_probs[t, token]) - score) for t, at in enumerate(best) for token, score in at.items()),
            default=0.0,
        )
        tolerance = LOG_PROB_TOLERANCE[self.target.dtype]
        if not difference <= tolerance:
            raise ValueError(
                f"the server's log-probabilities differ by up to {difference:.3g} (allowed {tolerance:g}) from those "
                f"that its states have with the final norm and the LM head of {self.server.target}: it serves "
                "other weights, or gives another state as the last one. Serve this target, without adapters"
            )
        return difference


class ServedFeatures(ReadFeatures):
    """Gives training the states that a server computes while the heads train.

    A queue of texts runs ahead of training: the server computes states, and its files wait in the shared folder until
    the batch before theirs trains. It holds `concurrency` texts, and at least the next batch.
    """

    def __init__(self, states: EndpointStates, feature_layers: Sequence[int]) -> None:
        super().__init__(states.target, feature_layers)
        self.states = states
        self._pool = ThreadPoolExecutor(states.num_in_flight)
        self._files: dict[Texts, dict[tuple[int, int, int], Future[Path]]] = {}

    def expect(self, texts: Texts) -> None:
        self._ask(texts)
        super().expect(texts)
        self.has_enough &= sum(map(len, self._files.values())) >= self.states.num_in_flight

    def find(self, texts: Texts, place: tuple[int, int, int]) -> Mapping[str, Tensor]:
        return self.states.take(self._files[texts].pop(place).result(), texts.ids(place)).tensors

    def __call__(self, batch: Mapping[str, Any]) -> TargetStates:
        texts = batch["texts"]
        if texts not in self._files:
            self._ask(texts)
        try:
            return super().__call__(batch)
        except (ConnectionError, ValueError) as error:
            raise MissingStatesError(str(error)) from error
        finally:
            self._drop(texts)

    def forget(self) -> None:
        """Also deletes the files that wait, and does not send the requests in the queue."""
        for texts in list(self._files):
            self._drop(texts)
        super().forget()

    def _drop(self, texts: Texts) -> None:
        for future in list(self._files.pop(texts).values()):  # the thread that reads ahead may still take one
            if not future.cancel():
                future.add_done_callback(_discard)

    def _ask(self, texts: Texts) -> None:
        self._files[texts] = {
            place: self._pool.submit(lambda ids: self.states.server.ask(ids)[0], texts.ids(place))
            for place in texts.places
        }


def refuse_without_target(model_args: ModelArguments, placement: PlacementArguments) -> None:
    """Raises ValueError for options that a server's target cannot follow."""
    if placement.target_device_map is not None:
        raise ValueError(
            f"got target_device_map {placement.target_device_map} with a server for the states, which places the "
            "target; give --target_device_map none"
        )
    if model_args.init_heads is not None and find_adapter_of(model_args.init_heads) is not None:
        raise ValueError(
            f"got a server for the states with init_heads {model_args.init_heads}, which change the target with an "
            "adapter that the server does not have: give other heads, or no server"
        )


def _discard(file: Future[Path]) -> None:
    if file.exception() is None:
        discard_file(file.result())


def _take_first(waiting: deque[tuple[int, int, Future[StoredRow]]]) -> tuple[int, int, StoredRow]:
    shard, index, future = waiting.popleft()
    return shard, index, future.result()
