"""The states of an extraction whose target runs in a vLLM server. Here are only the target's first layers, its final
norm and its LM head, for the last state and for the checks.

Legend: T tokens of a row, L states of each token, D hidden size, K best tokens, V target vocabulary.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.endpoint.client import EndpointClient
from training.endpoint.hidden_states import HiddenStates, WantedStates
from training.features.extraction_options import ExtractionArguments
from training.features.self_check import LOG_PROB_TOLERANCE, NUM_BEST, NUM_TOKENS, STATE_TOLERANCE
from training.features.store import FeatureStore, StoredRow, name_tensors, tensor_name
from training.features.store_checks import iterate_ids
from training.features.target_loading import FirstLayers

logger = logging.getLogger(__name__)

NUM_LAYERS = 3  # layers to load: EAGLE-3 taps the input of the third one, which can then be checked


class EndpointStates:
    """Reads the states of rows from a server, several rows at a time.

    Args:
        rows: with a column `input_ids`.
        layers: the hidden states to store, besides the last.
        target_name: as --target gives it.

    Raises:
        ConnectionError: no server.
        ValueError: the server has another model, or does not take the longest row.
    """

    def __init__(
        self, target: FirstLayers, rows: Any, args: ExtractionArguments, *, layers: Sequence[int], target_name: str
    ) -> None:
        self.target, self.rows, self.num_in_flight = target, rows, args.concurrency
        self.names = name_tensors(layers, target.num_layers)
        self.layers = sorted({*layers, target.num_layers})
        wanted = WantedStates(
            target=target_name,
            served_name=args.endpoint_model or target_name,
            layers=self.layers,
            hidden_size=target.hidden_size,
            dtype=target.dtype,
            max_length=max(map(len, iterate_ids(rows))),
            length_limit=target.max_length,
            folder=args.shared_folder,
        )
        assert args.endpoint is not None
        try:
            client = EndpointClient(args.endpoint, wanted.served_name)
        except ConnectionError as error:
            raise ConnectionError(f"{error}. If no server runs, start one with: {wanted.serve_command()}") from error
        self.server = HiddenStates(client, wanted)

    def __call__(self, shards: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int, StoredRow]]:
        """Yields (shard, row number, row) in order; requests run ahead, also into later shards."""
        waiting: deque[tuple[int, int, Future[StoredRow]]] = deque()
        pool = ThreadPoolExecutor(self.num_in_flight)
        try:
            for shard, index in ((shard, index) for shard, indices in shards.items() for index in indices):
                waiting.append((shard, index, pool.submit(self.read, torch.tensor(self.rows[index]["input_ids"]))))
                if len(waiting) == self.num_in_flight:
                    yield _take_first(waiting)
            while waiting:
                yield _take_first(waiting)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def read(self, input_ids: Tensor) -> StoredRow:
        """Asks for the states of one row's ids [T]."""
        return self._make_row(input_ids, self.server.read(input_ids)[0])

    def _make_row(self, input_ids: Tensor, states: Tensor) -> StoredRow:
        """Args: states: [T, L, D]."""
        tensors = {tensor_name(layer, self.target.num_layers): states[:, i] for i, layer in enumerate(self.layers)}
        tensors["last"] = self.target.apply_final_norm(states[:, -1])
        return StoredRow(input_ids, {name: tensors[name] for name in self.names})

    def check_target(self) -> float:
        """Compares the server with the target here, by the first tokens of the first row.

        Returns:
            the largest difference of log-probabilities.

        Raises:
            ValueError: another model or other states; gives the difference.
        """
        ids = torch.tensor(self.rows[0]["input_ids"][:NUM_TOKENS])
        states, answer = self.server.read(ids, prompt_logprobs=NUM_BEST)
        row = self._make_row(ids, states)
        self._compare(row, self._run_first_layers(ids), "those of the same layers here")
        difference = self._compare_log_probs(row.tensors["last"], answer)
        logger.info(
            "self-check: log-probabilities from the states differ by %.2g at most from the server's", difference
        )
        return difference

    def check_stored(self, folder: Path) -> None:
        """Raises ValueError when the store has other states of the first row than the server gives now."""
        ids = torch.tensor(self.rows[0]["input_ids"])
        if (stored := FeatureStore(folder).read(ids, self.names)) is not None:
            self._compare(self.read(ids), stored, f"those in {folder}")

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
            best = [{int(key): value["logprob"] for key, value in at.items()} for at in _prompt_scores(answer)]
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
                f"that its states have with the final norm and the LM head of {self.server.wanted.target}: it serves "
                "other weights, or gives another state as the last one. Serve this target, without adapters"
            )
        return difference


def _prompt_scores(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of the tokens after the first: the scores that the tokens before them gave."""
    scores: list[dict[str, Any]] = answer["choices"][0]["prompt_logprobs"][1:]
    return scores


def _take_first(waiting: deque[tuple[int, int, Future[StoredRow]]]) -> tuple[int, int, StoredRow]:
    shard, index, future = waiting.popleft()
    return shard, index, future.result()
