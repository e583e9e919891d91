"""Reads prompts into the target's cache and into the drafter, in chunks, and nothing twice.

The beginning that all rows of a batch share is read once, by a batch of one, and then copied. The part of a prompt that
the cache of an earlier call still holds is not read again (`HeldTexts`).

Legend: B batch, T longest prompt, F feature width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache.source import Source
from draftsmith.inference.cache.tree_cache import TreeCache
from draftsmith.inference.execution.step import DecodeStep
from draftsmith.inference.stats import GenerationStats
from draftsmith.inference.targets.multimodal import Media
from draftsmith.inference.targets.passes import TargetOutput

PREFILL_CHUNK = 512  # tokens of a row per eager forward pass
MIN_SHARED = 32  # a shared beginning shorter than this is not worth a pass of its own


@dataclass(frozen=True)
class HeldTexts:
    """The texts that a finished or interrupted call has left in the cache.

    Attributes:
        cache: holds the keys and values of every row's tokens except the newest.
        state: the drafter's; None without a drafter.
        texts: per row of the cache, its certain tokens.
        num_taken: per row, the slots that the drafter has read; None without a drafter.
    """

    cache: TreeCache
    state: Any
    texts: list[list[int]]
    num_taken: list[int] | None

    def match(self, prompts: Sequence[list[int]], *, room: int, needs_all: bool) -> Reused | None:
        """The part of the prompts that need not be read again; None if there is no such part.

        At least one token is always read, because its logits are needed. With a drafter, slot k - 1 pairs token k with
        a feature that is gone, so k tokens are kept only if the next token is the same, too.

        Args:
            room: as in `leave_room`.
            needs_all: whether a part of some prompts is of no use without a part of the others.
        """
        rows, kept = [], []
        for prompt in prompts:
            lengths = [self._count_kept(row, prompt) for row in range(len(self.texts))]
            kept.append(max(lengths))
            rows.append(lengths.index(max(lengths)))
        # Recurrent targets may read prompts in one chunk.
        kept = leave_room(kept, prompts, room, room if self.cache.states is not None else PREFILL_CHUNK)
        # Recurrent states are held for a few lengths only.
        kept = [self.cache.held_length(row, count) for row, count in zip(rows, kept, strict=True)]
        if not any(kept) or (needs_all and not all(kept)):
            return None
        return Reused(self.cache, self.state, rows, kept)

    def _count_kept(self, row: int, prompt: list[int]) -> int:
        text = self.texts[row]
        shared = count_shared([text, prompt])
        kept = min(shared, len(text) - 1, len(prompt) - 1)
        if self.num_taken is not None:
            kept = min(kept, shared - 1, self.num_taken[row])
        return max(kept, 0)


def count_shared(texts: Sequence[list[int]]) -> int:
    """The number of tokens that all texts begin with.

    >>> count_shared([[5, 6, 7], [5, 6], [5, 6, 8]])
    2
    """
    first, last = min(texts), max(texts)  # in the order of a dictionary
    pairs = enumerate(zip(first, last, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(last)))


@dataclass(frozen=True)
class ReadPrompts:
    """The result of reading the prompts.

    Attributes:
        state: the drafter's, which holds all slots except each row's last; None without a drafter.
        logits: [B, 1, V] after each prompt.
        feature: [B, 1, F] of each prompt's last token, which no slot of the drafter has yet, or None.
    """

    state: Any
    logits: Tensor
    feature: Tensor | None


@dataclass(frozen=True)
class Reused:
    """The part of the prompts that a cache and a drafter hold.

    Attributes:
        cache, state: of an earlier call, or of the beginning that all prompts share.
        rows: per prompt, the row that holds most of it.
        kept: per prompt, how many of its tokens are not read again.
    """

    cache: TreeCache
    state: Any
    rows: list[int]
    kept: list[int]


class PromptReader:
    """Reads a call's prompts into a cache and hands them to the drafter, all slots except each row's last.

    Args:
        cache: with room for one row per prompt; it may be the cache of `reused`.
        source: of the rows of an encoder-decoder target.
        reused: the part that need not be read.
        media: the prompts with their images, video or audio.
    """

    def __init__(
        self,
        step: DecodeStep,
        cache: TreeCache,
        prompts: Sequence[list[int]],
        source: Source | None,
        stats: GenerationStats,
        reused: Reused | None = None,
        *,
        media: Media | None = None,
    ) -> None:
        self.step, self.cache, self.prompts, self.source, self.stats = step, cache, prompts, source, stats
        self._reused, self._media = reused, media

    def read(self) -> ReadPrompts:
        """Reads the part that is not held. Call it once."""
        return last_value(self.chunks())

    def chunks(self) -> Generator[int, None, ReadPrompts]:
        """`read` chunk by chunk: yields the size of each chunk after it was read, and returns the result."""
        cache, prompts = self.cache, self.prompts
        reused, self._reused = self._reused, None
        if self._media is not None:
            return (yield from self._read_media(self._media))
        if reused is None:
            reused = yield from self._read_shared()
        if reused is None:
            cache.reset(len(prompts))
            return (yield from self._read_rest(self._start(prompts), prompts, [0] * len(prompts)))
        rows, kept = (torch.tensor(numbers, device=cache.lengths.device) for numbers in (reused.rows, reused.kept))
        cache.copy_rows(reused.cache, rows, kept, max_length=max(reused.kept))
        state, counts = self.step.copy_state(cache, reused.state, reused.rows, reused.kept), reused.kept
        del reused  # frees the earlier call's cache
        return (yield from self._read_rest(state, prompts, counts))

    def _read_shared(self) -> Generator[int, None, Reused | None]:
        """Reads the beginning that all prompts share into the first row, if it is worth a pass of its own."""
        cache, prompts, drafter = self.cache, self.prompts, self.step.drafter
        target = self.step.target
        if target.is_recurrent and (drafter is not None or target.reads_prompts_whole):
            return None  # its states would be one token ahead of the drafter's slots, or slow to go on from
        shared = count_shared(prompts) if len(prompts) > 1 and self.source is None else 0
        if shared < MIN_SHARED or not (drafter is None or drafter.can_copy_rows):
            return None
        # Up to the token before the shared beginning's last: the drafter pairs every feature with the next token.
        shared = min(shared, min(map(len, prompts)) - 1)
        cache.reset(1)
        state = self._start(prompts[:1])
        yield from self._read_rest(state, [prompts[0][:shared]], [0])
        kept = shared if drafter is None else shared - 1
        return Reused(cache, state, [0] * len(prompts), [kept] * len(prompts))

    def _start(self, prompts: Sequence[list[int]]) -> Any:
        state = None if self.step.drafter is None else self.step.start_drafter(self.cache)
        if self.source is not None:
            self.step.read_source(state, self.cache, self.source)
        if self.step.drafter is not None and self.step.drafter.reads_first_token:
            first_ids = torch.tensor([prompt[0] for prompt in prompts], device=self.cache.lengths.device)
            self.step.drafter.read_first(state, first_ids)
        return state

    def _read_rest(
        self, state: Any, prompts: Sequence[list[int]], kept: Sequence[int]
    ) -> Generator[int, None, ReadPrompts]:
        """Reads prompts[b][kept[b]:], at least one token of each row, after the tokens in cache and state.

        All rows end in the last chunk: rows with less to read wait for the others.
        """
        cache, device = self.cache, self.cache.lengths.device
        rests = [prompt[count:] for prompt, count in zip(prompts, kept, strict=True)]
        longest = max(map(len, rests))
        chunk = self.step.compiled_chunk(longest) or PREFILL_CHUNK
        if self.step.target.reads_prompts_whole:
            chunk = longest
        for start in range(0, longest, chunk):
            size = min(chunk, longest - start)
            # Per row, the tokens read before and after this chunk. It holds few or no tokens of rows that wait.
            begins, ends = ([max(0, place - longest + len(rest)) for rest in rests] for place in (start, start + size))
            spans = list(zip(rests, begins, ends, strict=True))
            cache.length_bound = max(count + begin for count, begin in zip(kept, begins, strict=True))
            reading = [(count, begin) for count, begin, end in zip(kept, begins, ends, strict=True) if begin < end]
            cache.length_floor = min(count + begin for count, begin in reading)
            token_ids, counts = _pad([rest[begin:end] for rest, begin, end in spans], size, device)
            output = self.step.read_chunk(cache, token_ids, counts)
            self.stats.num_target_forwards += 1
            cache.length_bound = max(count + end for count, end in zip(kept, ends, strict=True))
            # The token after the last one of a prompt is not known yet.
            following = [rest[begin + 1 : end + 1] for rest, begin, end in spans]
            read = self._hand_over(state, output, following, counts, size)
            del output  # or its features would stay alive during the next chunk
            yield size
        cache.length_floor = min(map(len, prompts))
        return read

    def _read_media(self, media: Media) -> Generator[int, None, ReadPrompts]:
        """Reads prompts with media, in one pass."""
        cache, prompts = self.cache, self.prompts
        cache.reset(len(prompts))
        state = self._start(prompts)
        output = self.step.read_media(cache, media)
        self.stats.num_target_forwards += 1
        read = self._hand_over(state, output, [prompt[1:] for prompt in prompts], media.counts, media.longest)
        yield media.longest
        cache.length_floor = min(map(len, prompts))
        return read

    def _hand_over(
        self, state: Any, output: TargetOutput, following: Sequence[list[int]], counts: Tensor, size: int
    ) -> ReadPrompts:
        """Gives the drafter what was read: counts[b] of `size` tokens of each row, and those that follow."""
        cache, drafter, device = self.cache, self.step.drafter, self.cache.lengths.device
        if drafter is not None and any(following):
            next_ids, num_slots = _pad(following, size, device)
            view = cache.view_slots(cache.length_bound).shape[0]
            drafter.extend(state, output.features, next_ids, num_slots, max_slots=view)
        feature = None
        if output.features is not None:
            rows = torch.arange(len(counts), device=device)
            feature = output.features[rows, (counts - 1).clamp(min=0)][:, None]
        return ReadPrompts(state, output.logits, feature)


def last_value(steps: Generator[int, None, ReadPrompts]) -> ReadPrompts:
    """Runs a generator to its end and returns what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            read: ReadPrompts = end.value
            return read


def _pad(rows: Sequence[list[int]], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows as [B, size] long, padded on the right, and how many are real [B]."""
    padded = [row + [0] * (size - len(row)) for row in rows]
    return torch.tensor(padded, device=device), torch.tensor([len(row) for row in rows], device=device)


def leave_room(kept: Sequence[int], prompts: Sequence[list[int]], room: int, chunk: int = PREFILL_CHUNK) -> list[int]:
    """Lowers the kept tokens of long rows: while they wait for rows with more to read, a chunk's padding would run over
    the end of the cache, or of the positions.

    >>> leave_room([250, 0], [[1] * 254, [2] * 100], room=256)
    [156, 0]
    """
    longest = max(len(prompt) - count for prompt, count in zip(prompts, kept, strict=True))
    return [min(count, room - min(chunk, longest)) for count in kept]
