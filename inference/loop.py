"""The decode loop: draft a token tree, verify it in one forward pass, accept, commit, repeat.

Legend: B rows still in the batch (of an output: all), L prompt length, N tree nodes, P path length (tree depth + 1),
V target vocabulary.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from draftsmith.inference.acceptance.exact import accept_exact
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.acceptance.walk import Acceptance
from draftsmith.inference.batch import Batch
from draftsmith.inference.drafters.slots import NewSlots
from draftsmith.inference.execution.drafting import Drafting, TreeChoice
from draftsmith.inference.execution.step import DecodeStep
from draftsmith.inference.prompts import HeldTexts, PromptReader
from draftsmith.inference.request.emitted_scores import EmittedScores
from draftsmith.inference.request.request import Request
from draftsmith.inference.stats import GenerationStats, PhaseClock
from draftsmith.inference.targets.passes import TargetOutput
from draftsmith.inference.trees.token_tree import TokenTree

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


class StepTokens(list[int]):
    """What one step gave a row: a list of token ids, which also tells which of them were drafted.

    Worked example, the verify step of `Acceptance`: the ids of "cat", "ran" and "away", depths 1, 2 and 0.
    """

    def __init__(self, token_ids: Sequence[int], probabilities: Sequence[float] = ()) -> None:
        """
        Args:
            probabilities: of the accepted drafts, which come first.
        """
        super().__init__(token_ids)
        self._drafted = list(probabilities)

    @property
    def num_drafted(self) -> int:
        """How many tokens, the first ones, were drafted."""
        return len(self._drafted)

    @property
    def depths(self) -> list[int]:
        """Of each token. d >= 1: an accepted draft of the tree's level d; 0: the target's own token."""
        return [*range(1, self.num_drafted + 1), *[0] * (len(self) - self.num_drafted)]

    @property
    def probabilities(self) -> list[float | None]:
        """Of each token, what the drafter gave an accepted draft among its candidates; None: the target's own token.

        They are the scores that rank the candidates (`DraftSampling.score`): for a greedy target they are taken at
        `GREEDY_TEMPERATURE`, and coupled drafts are scored with the noise of the target's draw.
        """
        return [*self._drafted, *[None] * (len(self) - self.num_drafted)]

    def cut(self, length: int) -> StepTokens:
        """The first `length` tokens."""
        return StepTokens(self[:length], self._drafted[:length])


@dataclass(frozen=True)
class Emission:
    """The tokens that a step, or the prompts, gave.

    Attributes:
        tokens: [B, P] int64; counts: [B] int64, how many of them are real (0: a finished row).
        log_probs: [B, P] float32, the drafter's log-probability of the path to each accepted node, the root's first.
        logits, scores: [B, P, V] of each token, or None when nobody keeps them.
        counted: [B, candidates] int64, `TreePolicy.count_accepted`, or None.
        is_first: whether these are the tokens after the prompts.
    """

    tokens: Tensor
    counts: Tensor
    log_probs: Tensor
    logits: Tensor | None
    scores: Tensor | None
    counted: Tensor | None = None
    is_first: bool = False

    def read(self) -> tuple[list[StepTokens], list[list[int]]]:
        """The step's one synchronisation: everything in one copy. Returns each row's real tokens, and `counted`."""
        width = self.tokens.shape[1]
        bits = self.log_probs.view(torch.int32)
        columns = [self.tokens, self.counts[:, None], bits, *([] if self.counted is None else [self.counted])]
        rows = torch.cat(columns, dim=1).tolist()
        tokens = [_read_row(row[: row[width]], row[width + 1 : 2 * width + 1]) for row in rows]
        return tokens, [row[2 * width + 1 :] for row in rows]


def _read_row(token_ids: list[int], bits: list[int]) -> StepTokens:
    """A row's tokens.

    Args:
        bits: of the float32 log-probabilities of the path to each accepted node, root first.
    """
    path = struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))[: len(token_ids)]
    return StepTokens(token_ids, [min(1.0, math.exp(below - above)) for above, below in itertools.pairwise(path)])


class DecodeLoop:
    """One call's texts, from the prompts to their last tokens."""

    def __init__(
        self,
        step: DecodeStep,
        request: Request,
        sampler: Sampler,
        choice: TreeChoice,
        clock: PhaseClock,
        *,
        on_step: StepCallback | None = None,
    ) -> None:
        self.step, self.request, self.clock, self.on_step = step, request, clock, on_step
        self.stats = clock.stats
        self.scores = EmittedScores(request)
        self._sampler, self._choice = sampler, choice
        self._is_between_steps = False
        self._compiled_before = step.executor.compile_seconds

    def steps(self, reader: PromptReader) -> Iterator[list[StepTokens]]:
        """Yields what each row of the call has newly emitted, until all have ended. Run it under
        `Target.without_autograd`.

        Args:
            reader: of the request's prompts.
        """
        emission = self.read_prompts(reader)
        while True:
            yield self.emit(emission)
            if self.request.is_finished:
                return
            tree, noise = self.draft()
            output = self.verify(tree)
            accepted = self.accept(tree, output, noise)
            emission = self.commit(tree, output, accepted)
            del tree, noise, output, accepted  # or they would be alive beside those of the next step

    def read_prompts(self, reader: PromptReader) -> Emission:
        """Reads the prompts and draws each row's first token."""
        request, sampler, cache = self.request, self._sampler, reader.cache
        self.clock.start()
        read = reader.read()
        self.clock.stop("prefill")
        self._choice.begin(do_sample=sampler.do_sample)
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
        log_probs = first.log_probs
        return Emission(accepted.next_tokens, accepted.counts, log_probs, logits, accepted.scores, is_first=True)

    def emit(self, emission: Emission) -> list[StepTokens]:
        """Hands tokens to the request; returns what each row of the call has kept."""
        batch, request = self.batch, self.request
        tokens, counted = emission.read()
        if not emission.is_first:
            self._count(tokens, width=emission.tokens.shape[1])
            going = [place for place, new in enumerate(tokens) if new]
            left = [request.budgets[batch.rows[place]] for place in going]
            self._choice.learn(self._choice.chosen, [counted[place] for place in going], left)
        kept = [StepTokens(()) for _ in range(request.batch_size)]
        for row, new, step in zip(batch.rows, request.emit(batch.rows, tokens), tokens, strict=True):
            kept[row] = step.cut(len(new))
        self.scores.add(batch.rows, [len(kept[row]) for row in batch.rows], emission.logits, emission.scores)
        if self.on_step is not None and request.batch_size == 1 and kept[0]:
            self.on_step(kept[0], kept[0].num_drafted)
        self.clock.stop("accept")
        self.stats.seconds["compile"] = self.step.executor.compile_seconds - self._compiled_before
        self._is_between_steps = True
        return kept

    def _count(self, tokens: Sequence[Sequence[int]], *, width: int) -> None:
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
        log_probs = tree.log_probs.gather(1, accepted.path)
        features, counted = self.step.commit(
            batch.cache, tree, accepted, counts, output.features, is_counting=self._choice.is_counting
        )
        batch.drafting.take(NewSlots(features, accepted.next_tokens.clamp(min=0), counts))
        if batch.sampler.texts is not None:
            batch.sampler.texts.commit(accepted.next_tokens, counts)
        self.clock.stop("commit")
        return Emission(accepted.next_tokens, counts, log_probs, logits, accepted.scores, counted)

    def held_texts(self) -> HeldTexts | None:
        """The texts that the next call may find in the cache; None when the loop was interrupted within a step."""
        return self.batch.held_texts() if self._is_between_steps else None


def gather_output(request: Request, scores: EmittedScores, stats: GenerationStats) -> GenerationOutput:
    """The output so far. It holds no loop, so none of the loop's buffers."""
    stats.num_new_tokens = request.num_new_tokens
    return GenerationOutput(request.sequences(), stats, scores.scores(), scores.logits())
