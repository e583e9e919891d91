"""The decode loop: draft a token tree, verify it in one forward pass, accept, commit, repeat.

Legend: B rows still in the batch (of an output: all), L prompt length, N tree nodes, P path length (tree depth + 1),
V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inference.acceptance.exact import Sampler, accept_exact
from inference.cache.tree_cache import TreeCache
from inference.execution.step import DecodeStep, NewSlots
from inference.planning.drafting import Drafting
from inference.prompts import HeldTexts, PromptReader, ReadPrompts
from inference.request.emitted_scores import EmittedScores
from inference.request.request import Request
from inference.stats import GenerationStats, PhaseClock
from inference.trees.token_tree import TokenTree

StepCallback = Callable[[list[int], int], None]
BeginDrafting = Callable[[TreeCache, Sampler, Any], Drafting]
ReadPromptsInto = Callable[[PromptReader, TreeCache], tuple[ReadPrompts, Any]]


@dataclass
class GenerationOutput(Mapping[str, Any]):
    """What a call returns. Like transformers' outputs it may also be read by name (`output["sequences"]`), without the
    fields that are None.

    Attributes:
        sequences: [B, L + new] int64, as transformers' generate returns them: the prompts as given (of an
            encoder-decoder target: what its decoder began with), then the new tokens, padded on the right.
        stats: what it took.
        scores, logits: with `return_dict_in_generate` and `output_scores` or `output_logits`, one [B, V] float32 per
            new token, as processors left them and as the target gave them (zeros for rows that had ended); else None.
        stopped_at_position_limit: of each row, whether it took all positions that the target is exact for
            (`Target.max_length`), before its own length limit and without an EOS.
    """

    sequences: Tensor
    stats: GenerationStats
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    stopped_at_position_limit: list[bool] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        value = vars(self)[name]
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in vars(self).items() if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass
class _Emission:
    """What a step, or the prompts, gave: tokens [B, P] and how many of them are real [B]; logits and scores
    [B, P, V] of each, or None when nobody keeps them."""

    tokens: Tensor
    counts: Tensor
    logits: Tensor | None
    scores: Tensor | None


def rows_may_leave(step: DecodeStep) -> bool:
    """Whether rows that have ended leave the batch. Compiled steps have one shape, and would be compiled again for
    every smaller batch."""
    return not step.is_compiled and (step.drafter is None or step.drafter.can_copy_rows)


class DecodeLoop:
    """One call's texts, from the prompts to their last tokens. `steps` is to be run under inference mode.

    Attributes:
        request: the call's rows, and what they have emitted.
        scores: what was kept of logits and scores.
        stats: what it took so far.
    """

    def __init__(
        self,
        step: DecodeStep,
        request: Request,
        sampler: Sampler,
        cache: TreeCache,
        stats: GenerationStats,
        clock: PhaseClock,
        *,
        begin_drafting: BeginDrafting,
        read_prompts: ReadPromptsInto,
        on_step: StepCallback | None = None,
    ) -> None:
        self.step, self.request, self.sampler, self.cache = step, request, sampler, cache
        self.stats, self.clock, self.on_step = stats, clock, on_step
        self.scores = EmittedScores(request)
        self._begin_drafting = begin_drafting
        self._read_prompts: ReadPromptsInto | None = read_prompts
        self._may_leave = rows_may_leave(step)
        self._reader = PromptReader(step, stats)
        self._rows = list(range(request.batch_size))  # which of the call's rows each row of the batch is
        self._num_taken = [0] * request.batch_size  # slots the drafter holds, for each row of the call
        self._is_damaged = [False] * request.batch_size  # rows whose keys and values were written over
        self._is_between_steps = False

    def steps(self) -> Iterator[list[list[int]]]:
        """Yields what each row of the call has newly emitted, for as long as any has not ended.

        One host synchronisation per step: reading what was emitted.
        """
        request, step, cache, clock = self.request, self.step, self.cache, self.clock
        step.stats = self.stats
        emission = self._read_and_draw()
        drafting = self._drafting
        is_first = True
        while True:
            emission = self._leave_finished(emission)
            asked = drafting.open(cache, self.sampler)
            clock.stop("draft")
            # The step's one synchronisation: everything in one copy.
            width = emission.tokens.shape[1]
            columns = [emission.tokens, emission.counts[:, None], *([] if asked is None else [asked])]
            read = torch.cat(columns, dim=1).tolist()
            num_emitted = [row[width] for row in read]
            kept = self._emit([row[:count] for row, count in zip(read, num_emitted, strict=True)], emission)
            if not is_first:
                # The read above; with processors that read the prefix also which rows walk on, at each depth.
                self.stats.num_host_syncs += 1 if self.sampler.is_prefix_free else 1 + width
                for count in num_emitted:
                    if count:
                        self.stats.count_step(count - 1)
            if self.on_step is not None and request.batch_size == 1 and kept[0]:
                self.on_step(kept[0], 0 if is_first else min(len(kept[0]), num_emitted[0] - 1))
            clock.stop("accept")
            self._is_between_steps = True
            yield kept
            if request.is_finished:
                return
            self._is_between_steps = False

            active = self._mask_finished()
            tree, noise = drafting.draft(cache, self.sampler, [row[width + 1 :] for row in read], num_emitted)
            if drafting.has_taken_all:
                for row in request.unfinished:
                    self._num_taken[row] = request.num_committed(row)
            self.stats.num_drafted += (tree.num_nodes - 1) * len(request.unfinished)
            clock.stop("draft")

            output = step.verify(cache, tree)
            self.stats.num_target_forwards += 1
            self.stats.num_verify_passes += 1
            clock.stop("verify")

            is_prefix_free = self.sampler.is_prefix_free
            accepted = step.accept(
                self.sampler,
                tree,
                output.logits,
                cache.lengths,
                noise=noise,
                prefixes=None if is_prefix_free else request.prefixes(self._rows),
                max_tokens=None if is_prefix_free else request.open_budgets(self._rows),
            )
            counts = accepted.counts if active is None else accepted.counts * active
            logits = self.scores.gather(output.logits, accepted.path)
            clock.stop("accept")

            features, counted = step.commit(cache, tree, accepted, counts, output.features)
            drafting.take(NewSlots(features, accepted.next_tokens.clamp(min=0), counts), counted)
            is_first, emission = False, _Emission(accepted.next_tokens, counts, logits, accepted.scores)
            del output, accepted, features, logits, noise  # or they would be alive beside those of the next step
            clock.stop("commit")

    def _read_and_draw(self) -> _Emission:
        """Reads the prompts and draws each row's first token."""
        cache, request, sampler = self.cache, self.request, self.sampler
        assert self._read_prompts is not None
        read, state = self._read_prompts(self._reader, cache)
        self._read_prompts = None  # it may hold the cache of an earlier call
        self.clock.stop("prefill")
        self._drafting = self._begin_drafting(cache, sampler, state)
        self.clock.stop("profile")
        self._num_taken = [request.num_committed(row) for row in self._rows]
        # The first token's "tree" is the last prompt token, which is already committed.
        first = TokenTree.from_root(request.last_prompt_ids)
        prefixes = None if sampler.is_prefix_free else request.prefixes(self._rows)
        accepted = accept_exact(sampler, first, read.logits, cache.lengths - 1, prefixes=prefixes)
        counts = torch.ones_like(cache.lengths)
        self._drafting.take(NewSlots(read.feature, accepted.next_tokens.clamp(min=0), counts))
        logits = self.scores.gather(read.logits, accepted.path)
        return _Emission(accepted.next_tokens, accepted.counts, logits, accepted.scores)

    def _emit(self, tokens: Sequence[Sequence[int]], emission: _Emission) -> list[list[int]]:
        """Hands tokens of the batch's rows to the request; returns what each row of the call has kept."""
        kept: list[list[int]] = [[] for _ in range(self.request.batch_size)]
        for row, new in zip(self._rows, self.request.emit(self._rows, tokens), strict=True):
            kept[row] = new
        self.scores.add(self._rows, [len(kept[row]) for row in self._rows], emission.logits, emission.scores)
        return kept

    def _mask_finished(self) -> Tensor | None:
        """Tells the cache what the host knows of lengths, and keeps rows that have ended but are still in the batch
        from growing. Returns [B], 1 for rows still decoding, or None if all are."""
        cache, request = self.cache, self.request
        is_active = [row in request.unfinished for row in self._rows]
        # Tight bounds keep the attention's view tight. The drafter still holds what rows that have ended have emitted.
        cache.length_bound = max(request.num_committed(row) for row in self._rows)
        cache.length_floor = min(request.num_committed(row) for row in request.unfinished)
        if all(is_active):
            return None
        active = torch.tensor(is_active, dtype=torch.long, device=cache.lengths.device)
        cache.lengths *= active  # they give up what they hold, so that no view has to reach them
        for place, row in enumerate(self._rows):
            self._is_damaged[row] |= not is_active[place]
        self._drafting.retire(active)
        return active

    def _leave_finished(self, emission: _Emission) -> _Emission:
        """Rows that have ended leave the batch: the last ones take their places, in the cache and everywhere else."""
        unfinished = self.request.unfinished
        num_left = sum(row in unfinished for row in self._rows)
        if num_left == len(self._rows) or not self._may_leave:
            return emission
        behind = [place for place in range(num_left, len(self._rows)) if self._rows[place] in unfinished]
        places = [place if self._rows[place] in unfinished else behind.pop() for place in range(num_left)]
        for place in set(range(len(self._rows))) - set(places):
            self._is_damaged[self._rows[place]] = True
        self.sampler = self.sampler.select(places, len(self._rows))
        self._rows = [self._rows[place] for place in places]
        self.cache.keep_rows(places)
        num_taken = [self._num_taken[row] for row in self._rows]
        state = self._reader.copy_state(self.cache, self._drafting.state, places, num_taken)
        self._drafting.keep_rows(places, state)
        kept = [None if x is None else x[places] for x in (emission.logits, emission.scores)]
        return _Emission(emission.tokens[places], emission.counts[places], *kept)

    def output(self) -> GenerationOutput:
        """What there is so far."""
        return gather_output(self.request, self.scores, self.stats)

    def held_texts(self) -> HeldTexts | None:
        """What the next call may find in the cache; None when the loop was interrupted within a step."""
        if not self._is_between_steps:
            return None
        return HeldTexts(
            self.cache,
            self._drafting.state,
            [[] if self._is_damaged[row] else self.request.text(row) for row in self._rows],
            None if self.step.drafter is None else [self._num_taken[row] for row in self._rows],
        )


def gather_output(request: Request, scores: EmittedScores, stats: GenerationStats) -> GenerationOutput:
    """What there is so far. Unlike its method, it holds no loop, so none of the loop's buffers either."""
    stats.num_new_tokens = request.num_new_tokens
    return GenerationOutput(
        request.sequences(), stats, scores.scores(), scores.logits(), request.stopped_at_position_limit
    )
