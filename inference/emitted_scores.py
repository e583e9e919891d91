"""Scores and logits of the emitted tokens, as transformers' generate returns them on request.

Legend: B rows in the batch, P path length, V target vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.inference.request.request import Request
from draftsmith.inference.request.row import Row
from draftsmith.inference.step import StepOutput


class EmittedScores:
    """The target's logits, and the scores after logits processors, as far as a request asks for them; float32."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._logits: list[list[Tensor]] = [[] for _ in range(request.batch_size)]  # per row, pieces [n, V]
        self._scores: list[list[Tensor]] = [[] for _ in range(request.batch_size)]

    def add(self, output: StepOutput, given: Sequence[tuple[int, Row, Sequence[int], Sequence[int]]]) -> None:
        """Adds those of a step's tokens.

        Args:
            given: as in `Emission`.
        """
        request = self.request
        logits = None
        if request.keeps_logits:
            path = output.accepted.path[..., None].expand(-1, -1, output.target.logits.shape[-1])
            logits = output.target.logits.gather(1, path).float()
        for held, values in ((self._logits, logits), (self._scores, output.accepted.scores)):
            if values is not None:
                for place, row, _, kept in given:
                    held[row.index].append(values[place, : len(kept)].clone())  # a view would keep all of `values`

    def logits(self) -> tuple[Tensor, ...] | None:
        """[B, V] for every emitted token, zero where a row has ended; None if not asked for."""
        return self._stack(self._logits) if self.request.keeps_logits else None

    def scores(self) -> tuple[Tensor, ...] | None:
        """As `logits`."""
        return self._stack(self._scores) if self.request.keeps_scores else None

    @staticmethod
    def _stack(kept: list[list[Tensor]]) -> tuple[Tensor, ...]:
        if not any(kept):
            return ()
        nothing = next(pieces for pieces in kept if pieces)[0][:0]
        rows = [torch.cat([nothing, *pieces]) for pieces in kept]
        stacked = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # [B, T, V]
        return tuple(stacked.clone().unbind(1))
