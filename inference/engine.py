"""Engine: the rows that decode together, and the loop over them.

Legend: B rows in the batch (of an output: all), L prompt length, P path length, V target vocabulary.
"""

from __future__ import annotations

import itertools
import math
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.emitted_scores import EmittedScores
from draftsmith.inference.planning.planner import Planner
from draftsmith.inference.request.row import Row
from draftsmith.inference.state import DecodeState
from draftsmith.inference.stats import GenerationStats, PhaseClock
from draftsmith.inference.step import Step, StepOutput
from draftsmith.inference.targets.backbone import TargetOutput
from draftsmith.inference.trees.batch_tree import BatchTree


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
    """What a step, or the prompts, gave the rows that had not ended.

    Attributes:
        output: the step's.
        widths: nodes of each row in the step's tensors, root included; where a drafter had no token, padding counts.
        given: of each row, its place in the step's tensors, what the step gave it, and what its text keeps of that.
    """

    output: StepOutput
    widths: list[int]
    given: list[tuple[int, Row, StepTokens, StepTokens]]


class Engine:
    """The rows that decode together. `generate` runs it to the end; a server advances it while rows come and go.

    Run it under `Target.without_autograd` and the step's `active`.

    Args:
        state: the rows', empty or of an earlier call.
        clock: its stats count the steps.
        planner: chooses each step's policy; None = it is the step's own.
        records_probabilities: tell how probable the drafter found each accepted draft (`StepTokens`).
    """

    def __init__(
        self,
        step: Step,
        state: DecodeState,
        clock: PhaseClock,
        *,
        planner: Planner | None = None,
        records_probabilities: bool = False,
    ) -> None:
        self.step, self.state, self.clock, self.planner = step, state, clock, planner
        self.records_probabilities, self.stats = records_probabilities, clock.stats
        self.is_finished = self._has_joined = False
        self.sampler: Sampler
        self._setup_before = step.runner.seconds()

    def run(self, read: TargetOutput, sampler: Sampler, scores: EmittedScores | None) -> Iterator[list[StepTokens]]:
        """Decodes the rows whose prompts `prefill` has read into the state; yields what each row keeps of every step.

        Args:
            scores: gets those of the emitted tokens.

        Raises:
            ValueError: no token can follow one of the texts.
        """
        emission = self.start(read, sampler)
        del read
        while True:
            kept = []
            for _, row, _, own in emission.given:
                row.check()
                kept.append(own)
            if scores is not None:
                scores.add(emission.output, emission.given)
            del emission  # or its tensors would be alive beside those of the next step
            yield kept
            if self.is_finished:
                return
            emission = self.advance()

    def start(self, read: TargetOutput, sampler: Sampler) -> Emission:
        """Draws each row's first token."""
        self.sampler = sampler
        if self.planner is not None:
            self.planner.begin(do_sample=sampler.do_sample)
        return self.emit(self.step.first(self.state, read, sampler))

    def advance(self) -> Emission:
        """One step of all rows."""
        state, planner, policy, began = self.state, self.planner, self.step.policy, time.perf_counter()
        if planner is not None:
            longest = max(row.num_committed for row in state.rows if not row.is_finished)
            policy = planner.choose(len(state.rows), longest, state.pending_bound)
        output = self.step(
            state,
            policy,
            self.sampler,
            self.clock,
            is_counting=planner is not None and planner.is_counting,
            records_probabilities=self.records_probabilities,
        )
        is_lazy, width = self.sampler.is_lazy, output.accepted.path.shape[1]
        emission, stats = self.emit(output), self.stats
        if isinstance(policy, BatchTree):
            policy.learn(output.tree, output.accepted.path, time.perf_counter() - began)
        stats.num_target_forwards += 1
        stats.num_verify_passes += 1
        # The read of the emission; with lazy processors also which rows walk on, at each depth.
        stats.num_host_syncs += 1 + width if is_lazy else 1
        for place, _, new, _ in emission.given:
            stats.num_drafted += emission.widths[place] - 1
            stats.count_step(len(new) - 1)
        return emission

    def emit(self, output: StepOutput) -> Emission:
        """Hands tokens to their texts, which decide whether they have ended."""
        state, width = self.state, output.accepted.path.shape[1]
        end = 1 + width * (2 if output.has_probabilities else 1)
        tree = output.tree
        emission = Emission(output, tree.widths or [tree.num_nodes] * len(tree.token_ids), [])
        counted: list[list[int]] = []
        emitted = output.emitted.tolist()  # the step's one synchronisation
        for place, (row, values) in enumerate(zip(state.rows, emitted, strict=True)):
            if row.is_finished:
                continue
            new = _read_row(values[:end], width)
            if row.states is not None and not output.is_first:
                _show_states(row, place, output, len(new))
            num_kept = row.emit(new)
            emission.given.append((place, row, new, new if num_kept == len(new) else new.cut(num_kept)))
            counted.append(values[end:] or [len(new) - 1])
        if self.planner is not None and not output.is_first:
            self.planner.learn(output.policy, counted)
        self.settle_rows()
        self.clock.stop("accept")
        self.stats.seconds["compile"] = self.step.runner.seconds() - self._setup_before
        return emission

    def settle_rows(self) -> None:
        """Finished rows leave, or stay idle where shapes are fixed or the drafter cannot drop them."""
        state, ended = self.state, list[int]()
        state.is_whole = True
        for place, row in enumerate(state.rows):
            if row.is_finished:
                ended.append(place)
                state.is_whole = state.is_whole and row.error is None
        self.is_finished = len(ended) == len(state.rows)
        if self.is_finished and self.planner is not None:
            self.planner.store()
        if not ended or self.is_finished:  # then the cache stays as it is, for the next call
            return
        if not self.step.rows_may_leave:
            state.retire(ended)
            return
        self.sampler = self.sampler.select(state.compact(ended), state.history)
        if self.planner is not None:
            self.planner.begin(do_sample=self.sampler.do_sample, is_served=self._has_joined)

    def add(self, state: DecodeState, sampler: Sampler) -> None:
        """A text of another state joins. Only for rows that are calls of their own."""
        self._has_joined = True
        samplers = [self.sampler, sampler] if self.state.rows else [sampler]
        self.state.add(state)
        self.sampler = Sampler.join(samplers, self.state.history)
        if self.planner is not None:
            self.planner.begin(do_sample=self.sampler.do_sample, is_served=self._has_joined)


def _show_states(row: Row, place: int, output: StepOutput, count: int) -> None:
    """Hands the row's learner the states of the nodes that a step has committed."""
    path = output.accepted.path[place, :count]
    features, last = output.target.features, output.target.last
    assert row.states is not None
    assert features is not None
    assert last is not None
    row.states.add(row.num_committed, features[place, path], last[place, path])


def _read_row(values: list[int], width: int) -> StepTokens:
    """A row's tokens, from what the host read of it (`StepOutput.emitted`)."""
    tokens, bits = values[: values[width]], values[width + 1 :]
    if not bits:
        return StepTokens(tokens, [math.nan] * (len(tokens) - 1))
    path = struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))[: len(tokens)]
    return StepTokens(tokens, [min(1.0, math.exp(below - above)) for above, below in itertools.pairwise(path)])
