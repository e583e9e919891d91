"""The decode loop: draft a token tree, verify it in one forward pass, accept, commit, repeat.

Legend: B rows still in the batch (of an output: all), L prompt length, N tree nodes, P path length (tree depth + 1),
V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from inference.acceptance.exact import accept_exact
from inference.acceptance.sampler import Sampler
from inference.acceptance.walk import Acceptance
from inference.batch import Batch
from inference.drafters.slots import NewSlots
from inference.execution.drafting import Drafting, TreeChoice
from inference.execution.step import DecodeStep
from inference.prompts import HeldTexts, PromptReader
from inference.request.emitted_scores import EmittedScores
from inference.request.request import Request
from inference.stats import GenerationStats, PhaseClock
from inference.targets.target import TargetOutput
from inference.trees.token_tree import TokenTree

StepCallback = Callable[[list[int], int], None]


@dataclass
class GenerationOutput(ModelOutput):
    """The result of a call.

    Attributes:
        sequences: [B, L + new] int64, as transformers' generate returns them: the prompts as given (of an
            encoder-decoder target: the first tokens of its decoder), then the new tokens, padded on the right.
        stats: counts and times.
        scores, logits: with `return_dict_in_generate` and `output_scores` or `output_logits`, one [B, V] float32 per
            new token, as processors left them and as the target gave them (zeros for rows that had ended); else None.
    """

    sequences: Tensor
    stats: GenerationStats = None  # type: ignore[assignment]  # ModelOutput allows one field without a default
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class Emission:
    """The tokens that a step, or the prompts, gave.

    Attributes:
        tokens: [B, P] int64; counts: [B] int64, how many of them are real (0: a finished row).
        logits, scores: [B, P, V] of each token, or None when nobody keeps them.
        counted: [B, candidates] int64, `TreePolicy.count_accepted`, or None.
        is_first: whether these are the tokens after the prompts.
    """

    tokens: Tensor
    counts: Tensor
    logits: Tensor | None
    scores: Tensor | None
    counted: Tensor | None = None
    is_first: bool = False

    def read(self) -> tuple[list[list[int]], list[list[int]]]:
        """The step's one synchronisation: everything in one copy. Returns each row's real tokens, and `counted`."""
        width = self.tokens.shape[1]
        columns = [self.tokens, self.counts[:, None], *([] if self.counted is None else [self.counted])]
        rows = torch.cat(columns, dim=1).tolist()
        return [row[: row[width]] for row in rows], [row[width + 1 :] for row in rows]


class DecodeLoop:
    """One call's texts, from the prompts to their last tokens."""

    def __init__(
        self,
        step: DecodeStep,
        request: Request,
        sampler: Sampler,
        reader: PromptReader,
        choice: TreeChoice,
        clock: PhaseClock,
        *,
        on_step: StepCallback | None = None,
    ) -> None:
        self.step, self.request, self.clock, self.on_step = step, request, clock, on_step
        self.stats = clock.stats
        self.scores = EmittedScores(request)
        self._reader, self._sampler, self._choice = reader, sampler, choice
        self._is_between_steps = False
        self._compiled_before = step.executor.compile_seconds

    def steps(self) -> Iterator[list[list[int]]]:
        """Yields what each row of the call has newly emitted, until all have ended. Run it under
        `Target.without_autograd`."""
        emission = self.read_prompts()
        while True:
            yield self.emit(emission)
            if self.request.is_finished:
                return
            tree, noise = self.draft()
            output = self.verify(tree)
            accepted = self.accept(tree, output, noise)
            emission = self.commit(tree, output, accepted)
            del tree, noise, output, accepted  # or they would be alive beside those of the next step

    def read_prompts(self) -> Emission:
        """Reads the prompts and draws each row's first token."""
        request, sampler = self.request, self._sampler
        read = self._reader.read()
        cache = self._reader.cache
        self.clock.stop("prefill")
        self._choice.begin(self.step, sampler, cache.batch_size)
        self.batch = Batch(request, sampler, cache, Drafting(self.step, self._choice, read.state))
        self.clock.stop("profile")
        # The first token's "tree" is the last prompt token, which is already committed.
        first = TokenTree.from_root(
            torch.tensor([prompt[-1] for prompt in request.prompts], device=cache.lengths.device)
        )
        accepted = accept_exact(sampler, first, read.logits, cache.lengths - 1)
        if sampler.texts is not None:
            sampler.texts.commit(accepted.next_tokens, accepted.counts)
        self.batch.drafting.take(
            NewSlots(read.feature, accepted.next_tokens.clamp(min=0), torch.ones_like(cache.lengths))
        )
        logits = self.scores.gather(read.logits, accepted.path)
        return Emission(accepted.next_tokens, accepted.counts, logits, accepted.scores, is_first=True)

    def emit(self, emission: Emission) -> list[list[int]]:
        """Hands tokens to the request; returns what each row of the call has kept."""
        batch, request = self.batch, self.request
        tokens, counted = emission.read()
        kept: list[list[int]] = [[] for _ in range(request.batch_size)]
        for row, new in zip(batch.rows, request.emit(batch.rows, tokens), strict=True):
            kept[row] = new
        self.scores.add(batch.rows, [len(kept[row]) for row in batch.rows], emission.logits, emission.scores)
        if not emission.is_first:
            self._count(tokens, width=emission.tokens.shape[1])
            rows = sorted(zip(batch.rows, counted, tokens, strict=True), key=lambda one: -request.budgets[one[0]])
            self._choice.learn([row for _, row, new in rows if new])
        if self.on_step is not None and request.batch_size == 1 and kept[0]:
            self.on_step(kept[0], 0 if emission.is_first else min(len(kept[0]), len(tokens[0]) - 1))
        self.clock.stop("accept")
        self.stats.seconds["compile"] = self.step.executor.compile_seconds - self._compiled_before
        self._is_between_steps = True
        return kept

    def _count(self, tokens: list[list[int]], *, width: int) -> None:
        """Counts a verify step in the statistics."""
        # The read of the emission; with lazy processors also which rows walk on, at each depth.
        self.stats.num_host_syncs += 1 + width if self.batch.sampler.is_lazy else 1
        for row in tokens:
            if row:
                self.stats.count_step(len(row) - 1)

    def draft(self) -> tuple[TokenTree, Tensor | None]:
        """The next tree, and the step's noise."""
        self._is_between_steps = False
        batch = self.batch
        batch.settle()
        tree, noise = batch.drafting.draft(batch.cache, batch.sampler)
        batch.note_drafted()
        self.stats.num_drafted += (tree.num_nodes - 1) * len(self.request.unfinished)
        self.clock.stop("draft")
        return tree, noise

    def verify(self, tree: TokenTree) -> TargetOutput:
        """One forward pass of the target over all nodes."""
        output = self.step.verify(self.batch.cache, tree)
        self.stats.num_target_forwards += 1
        self.stats.num_verify_passes += 1
        self.clock.stop("verify")
        return output

    def accept(self, tree: TokenTree, output: TargetOutput, noise: Tensor | None) -> Acceptance:
        """The drafted tokens that are kept, and the bonus token."""
        batch = self.batch
        accepted = self.step.accept(batch.sampler, tree, output.logits, batch.cache.lengths, noise=noise)
        self.clock.stop("accept")
        return accepted

    def commit(self, tree: TokenTree, output: TargetOutput, accepted: Acceptance) -> Emission:
        """Keeps the accepted nodes in the cache, and tells the drafter of them."""
        batch = self.batch
        counts = accepted.counts if batch.active is None else accepted.counts * batch.active
        logits = self.scores.gather(output.logits, accepted.path)
        features, counted = self.step.commit(
            batch.cache, tree, accepted, counts, output.features, is_counting=self._choice.is_counting
        )
        batch.drafting.take(NewSlots(features, accepted.next_tokens.clamp(min=0), counts))
        if batch.sampler.texts is not None:
            batch.sampler.texts.commit(accepted.next_tokens, counts)
        self.clock.stop("commit")
        return Emission(accepted.next_tokens, counts, logits, accepted.scores, counted)

    def held_texts(self) -> HeldTexts | None:
        """The texts that the next call may find in the cache; None when the loop was interrupted within a step."""
        return self.batch.held_texts() if self._is_between_steps else None


def gather_output(request: Request, scores: EmittedScores, stats: GenerationStats) -> GenerationOutput:
    """The output so far. It holds no loop, so none of the loop's buffers."""
    stats.num_new_tokens = request.num_new_tokens
    return GenerationOutput(request.sequences(), stats, scores.scores(), scores.logits())
