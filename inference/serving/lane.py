"""Lane: rows that share a drafter, a tree and a cache, and so every pass. Rows join and leave between steps.

A joining row's prompt is read in a buffer, so that running rows wait for one chunk at most. Then its keys and values,
its drafter state and its sampler come after those of the present rows. A step serves all rows, whatever their sampling
options are: each row keeps its own sampler and seed (`JoinedSampler`), so its text is the one it would get by itself.

Legend: B rows of the lane, N tree nodes, P path length, V target vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import torch
from torch import Tensor

from draftsmith.inference.acceptance.exact import accept_exact
from draftsmith.inference.acceptance.joined_sampler import JoinedSampler
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.acceptance.walk import Acceptance
from draftsmith.inference.batch import close_ranks
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafters.slots import NewSlots
from draftsmith.inference.execution.drafting import Drafting
from draftsmith.inference.loop import Emission, StepTokens
from draftsmith.inference.prompts import HeldTexts, ReadPrompts
from draftsmith.inference.request.texts import Texts
from draftsmith.inference.serving.prompt_buffers import NUM_BUFFERS, PromptBuffer, PromptBuffers
from draftsmith.inference.serving.row import Row, RowToken
from draftsmith.inference.trees.token_tree import TokenTree


class Lane:
    """The rows of one drafter and tree.

    Args:
        decoder: with exact acceptance, whose drafter can copy rows, and without graphs.
        max_rows: the most rows that run at once.
        max_length: the most tokens of a row, prompt included.

    Attributes:
        rows: those that are running.

    Raises:
        ValueError: for a decoder that cannot serve.
    """

    def __init__(self, decoder: Decoder, *, max_rows: int, max_length: int) -> None:
        self.step, self.choice = decoder.step, decoder.choice
        if not self.step.rows_may_leave:
            raise ValueError(
                f"rows join and leave a served batch, and {type(decoder.drafter).__name__} cannot copy rows (or the "
                "decoder has graphs): implement Drafter.copy_rows, keep_rows and add_rows, or use another drafter"
            )
        self.max_rows = max_rows
        # A row's last step may go beyond its end.
        self._capacity = self.step.round_capacity(max_length + self.step.num_slots_after + self.step.num_depths)
        self._cache = self.step.new_cache(max_rows, self._capacity)
        self._cache.reset(0)
        self._buffers = PromptBuffers(self.step, self._capacity)
        self.rows: list[Row] = []
        self.last_used = time.perf_counter()
        self._sampler: JoinedSampler
        self._drafting: Drafting

    @property
    def num_bytes(self) -> int:
        """Of the target's keys and values, for all rows and prompts."""
        planes = [plane for spec in self._cache.layer_specs if spec for plane in (spec.keys, spec.values)]
        per_slot = sum(plane.num_heads * plane.width * plane.dtype.itemsize for plane in planes)
        return per_slot * self._capacity * (self.max_rows + NUM_BUFFERS)

    def join(self, row: Row) -> Generator[int]:
        """Reads a row's prompt, emits its first token, and adds the row to the others unless it has ended. Yields the
        size of each chunk after it was read; other rows may join, leave and step in between, one such call at a
        time."""
        row.started = time.perf_counter()
        running = self._held_texts() if self.rows else None
        buffer, read = yield from self._buffers.read(row.prompt, running)
        sampler = Sampler.of_request(
            row.request, row.row_seed, capacity=self._capacity, vocab_size=self.step.target.vocab_size
        )
        texts = sampler.texts or row.request.new_texts(self._capacity)
        first = TokenTree.from_root(torch.tensor([row.prompt[-1]], device=buffer.cache.lengths.device))
        accepted = accept_exact(sampler, first, read.logits, buffer.cache.lengths - 1)
        texts.commit(accepted.next_tokens, accepted.counts)
        row.take(self._tokens_of(row, 0, accepted, read.logits, StepTokens(accepted.next_tokens[0].tolist())))
        if not row.is_over:
            slots = NewSlots(read.feature, accepted.next_tokens.clamp(min=0), accepted.counts)
            self._add(row, buffer, read, sampler, texts, slots)

    def _add(
        self, row: Row, buffer: PromptBuffer, read: ReadPrompts, sampler: Sampler, texts: Texts, slots: NewSlots
    ) -> None:
        num_read = len(row.prompt)
        if self.rows:
            self._cache.add_rows(buffer.cache, max_length=num_read)
            self._drafting.add_rows(read.state, slots, self._cache, max_slots=num_read)
            self._sampler = self._sampler.add(sampler, texts)
        else:
            self._cache.reset(0)
            self._cache.add_rows(buffer.cache, max_length=num_read)
            state = self.step.copy_state(self._cache, read.state, [0], [num_read - 1])
            self._drafting = Drafting(self.step, self.choice, state)
            self._drafting.take(slots)
            self._sampler = JoinedSampler([sampler], texts)
        self.rows.append(row)
        self.choice.begin(do_sample=self._sampler.do_sample)

    def _held_texts(self) -> HeldTexts:
        """The running texts. The drafter has certainly read the slots of the prompts."""
        num_taken = None if self.step.drafter is None else [len(row.prompt) - 1 for row in self.rows]
        return HeldTexts(self._cache, self._drafting.state, [row.request.text(0) for row in self.rows], num_taken)

    def advance(self) -> None:
        """One step of all rows; those that have ended leave."""
        self.last_used = time.perf_counter()
        cache, sampler, step = self._cache, self._sampler, self.step
        committed = [row.request.num_committed(0) for row in self.rows]
        cache.length_bound, cache.length_floor = max(committed), min(committed)
        sampler.all_texts.open_view(max(committed) + 1 + step.num_depths)
        tree, noise = self._drafting.draft(cache, sampler)
        output = step.verify(cache, tree)
        accepted = step.accept(sampler, tree, output.logits, cache.lengths, noise=noise)
        is_counting = self.choice.is_counting
        features, counted = step.commit(
            cache, tree, accepted, accepted.counts, output.features, is_counting=is_counting
        )
        self._drafting.take(NewSlots(features, accepted.next_tokens.clamp(min=0), accepted.counts))
        sampler.all_texts.commit(accepted.next_tokens, accepted.counts)
        log_probs = tree.log_probs.gather(1, accepted.path)
        tokens, counts = Emission(accepted.next_tokens, accepted.counts, log_probs, None, None, counted).read()
        self.choice.learn(self.choice.chosen, counts, [row.request.budgets[0] for row in self.rows])
        for place, (row, new) in enumerate(zip(self.rows, tokens, strict=True)):
            row.stats.count_step(len(new) - 1)
            row.stats.num_drafted += tree.num_nodes - 1
            row.num_drafts += tree.num_nodes > 1
            row.take(self._tokens_of(row, place, accepted, output.logits, new))
        self.drop_rows()

    def _tokens_of(self, row: Row, place: int, accepted: Acceptance, logits: Tensor, new: StepTokens) -> list[RowToken]:
        """A row's emitted tokens, with what the request wants to know of them."""
        told = (new, [""] * len(new), new.depths, new.probabilities)
        if row.num_top is None:
            return [RowToken(*each) for each in zip(*told, strict=True)]
        path = accepted.path[place, : len(new)]
        log_probs = logits[place, path].float().log_softmax(-1)
        own = log_probs.gather(1, torch.tensor(new, device=path.device).clamp(min=0)[:, None])[:, 0].tolist()
        values, ids = (part.tolist() for part in log_probs.topk(row.num_top, dim=-1))
        tops = [tuple(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
        return [RowToken(*each) for each in zip(*told, own, tops, strict=True)]

    def drop_rows(self) -> None:
        """Rows that have ended, or been cancelled, leave."""
        places = close_ranks([not row.is_over for row in self.rows])
        if not places:
            self.rows = []
        elif len(places) < len(self.rows):
            self._sampler = self._sampler.select(places, len(self.rows))
            self._cache.length_bound = max(row.request.num_committed(0) for row in self.rows)
            self._cache.keep_rows(places)
            self._drafting.keep_rows(places, self._cache)
            self.rows = [self.rows[place] for place in places]
            self.choice.begin(do_sample=self._sampler.do_sample)
