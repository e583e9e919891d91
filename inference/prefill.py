"""Reads prompts into a state, in chunks, and nothing twice: into the target's cache, and into the drafter or what waits
for it.

The beginning that all rows of a batch share is read once, by a batch of one, and then copied. The part of a prompt that
a state holds already is not read again (`prefix_cache`).

Legend: B batch, T longest prompt, F feature width, V target vocabulary.
"""

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache.kv_cache import KVCache, Span
from draftsmith.inference.cache.source import Source
from draftsmith.inference.drafters.base import PREFILL_CHUNK
from draftsmith.inference.prefix_cache import PrefixHit, count_shared
from draftsmith.inference.request.row import Row
from draftsmith.inference.state import DecodeState
from draftsmith.inference.stats import GenerationStats
from draftsmith.inference.step import VERIFIED_CHUNK, Step, read_pending
from draftsmith.inference.targets.backbone import TargetOutput
from draftsmith.inference.targets.multimodal import Media, read_media
from draftsmith.inference.trees.token_tree import TokenTree

MIN_SHARED = 32  # a shared beginning shorter than this is not worth a pass of its own
# Longer prompts are read eagerly: most of their time is products, which are as fast.
VERIFIED_PROMPT = 256


def prefill(
    state: DecodeState,
    step: Step,
    rows: Sequence[Row],
    stats: GenerationStats,
    *,
    source: Source | None = None,
    media: Media | None = None,
    hit: PrefixHit | None = None,
    may_wait: bool = False,
) -> Generator[int, None, TargetOutput]:
    """Reads the prompts of rows, with room for them in the state. Yields the size of each chunk after it was read.

    Args:
        source: of the rows of an encoder-decoder target.
        media: the prompts with their images, video or audio.
        hit: the part that need not be read; its cache may be the state's.
        may_wait: let the drafter read when it drafts, if it does, where there is room until then. It reads the
            beginning that a batch shares at once.

    Returns:
        logits [B, 1, V] after each prompt, and features [B, 1, F] of its last token, which the drafter has not read.
    """
    prompts = [row.prompt for row in rows]
    state.open(rows, has_media=media is not None, may_wait=may_wait)
    if media is not None:
        return (yield from _read_media(state, step, prompts, stats, media))
    if hit is None and source is None:
        hit = yield from _read_shared(state, step, prompts, stats)
    if hit is None:
        _begin(state, step, prompts, source)
        num_cached = [0] * len(prompts)
    else:
        state.copy_rows(hit.cache, hit.draft, hit.rows, hit.num_cached)
        num_cached = hit.num_cached
        del hit  # frees an earlier call's cache
    return (yield from _read_rest(state, step, prompts, num_cached, stats, rows))


def finish(steps: Generator[Any, None, TargetOutput]) -> TargetOutput:
    """Runs `prefill` to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            read: TargetOutput = end.value
            return read


def _begin(state: DecodeState, step: Step, prompts: Sequence[list[int]], source: Source | None = None) -> None:
    """An empty cache, and a drafter that has read nothing but what comes before the slots."""
    state.cache.reset(len(prompts))
    state.start_drafter()
    if source is not None:
        step.target.read_source(state.cache, source)
        if step.drafter is not None:
            step.drafter.read_source(state.draft, source.token_ids, source.mask)
    if step.drafter is not None and step.drafter.reads_first_token:
        first_ids = torch.tensor([prompt[0] for prompt in prompts], device=state.cache.lengths.device)
        step.drafter.read_first(state.draft, first_ids)


def _read_shared(
    state: DecodeState, step: Step, prompts: Sequence[list[int]], stats: GenerationStats
) -> Generator[int, None, PrefixHit | None]:
    """Reads the beginning that all prompts share into the first row, if it is worth a pass of its own."""
    target, drafter = step.target, step.drafter
    if target.is_recurrent and (drafter is not None or target.reads_prompts_whole):
        return None  # its states would be one token ahead of the drafter's slots, or slow to go on from
    shared = count_shared(prompts) if len(prompts) > 1 else 0
    if shared < MIN_SHARED or not (drafter is None or drafter.can_copy_rows):
        return None
    # Up to the token before the shared beginning's last: the drafter pairs every feature with the next token.
    shared = min(shared, min(map(len, prompts)) - 1)
    _begin(state, step, prompts[:1])
    yield from _read_rest(state, step, [prompts[0][:shared]], [0], stats)
    kept = shared if drafter is None else shared - 1
    return PrefixHit(state.cache, state.draft, [0] * len(prompts), [kept] * len(prompts))


def _read_rest(
    state: DecodeState,
    step: Step,
    prompts: Sequence[list[int]],
    kept: Sequence[int],
    stats: GenerationStats,
    rows: Sequence[Row] = (),
) -> Generator[int, None, TargetOutput]:
    """Reads prompts[b][kept[b]:], at least one token of each row, after the tokens in cache and drafter.

    All rows end in the last chunk: rows with less to read wait for the others. `rows` get the states that they gather.
    """
    cache, device = state.cache, state.cache.lengths.device
    longest = max(len(prompt) - count for prompt, count in zip(prompts, kept, strict=True))
    chunk = VERIFIED_CHUNK if step.verifies_prompts and longest <= VERIFIED_PROMPT else PREFILL_CHUNK
    if step.target.reads_prompts_whole:
        chunk = longest
    for start in range(0, longest, chunk):
        size = min(chunk, longest - start)
        # Where this chunk begins and ends in each prompt. It holds few or no tokens of rows that wait.
        begins, ends = (
            [max(count, len(prompt) - longest + place) for prompt, count in zip(prompts, kept, strict=True)]
            for place in (start, start + size)
        )
        parts = list(zip(prompts, begins, ends, strict=True))
        span = Span(min(begin for _, begin, end in parts if begin < end), max(begins))
        token_ids, counts = _pad([prompt[begin:end] for prompt, begin, end in parts], size, device)
        output = _read_chunk(cache, step, token_ids, counts, span)
        stats.num_target_forwards += 1
        # The token after the last one of a prompt is not known yet.
        following = [prompt[begin + 1 : end + 1] for prompt, begin, end in parts]
        for place, row in enumerate(rows):
            count = ends[place] - begins[place]
            if row.states is not None and output.features is not None and output.last is not None and count:
                row.states.add(begins[place], output.features[place, :count], output.last[place, :count])
        read = _hand_over(state, output, following, counts, size, max(ends))
        del output  # or its features would stay alive during the next chunk
        yield size
    return read


def _read_chunk(cache: KVCache, step: Step, token_ids: Tensor, counts: Tensor, span: Span) -> TargetOutput:
    """Reads a chunk of prompts and commits it; arguments as in `Target.prefill`."""
    length = token_ids.shape[1]
    view = cache.view_slots(span.longest + length).shape[0]
    # Sizes that runners would take for others: torch takes a size of 1 for fixed, and may take two equal ones for one;
    # the beginning that a batch shares is read by one row.
    is_other = not 1 < length <= VERIFIED_CHUNK or length == view or cache.batch_size < cache.max_batch_size
    if not step.verifies_prompts or is_other:
        return step.target.prefill(cache, token_ids, counts, span=span, feature_layers=step.feature_layers)
    output = step.verify(cache, TokenTree.from_prompts(token_ids, counts), span)
    cache.advance(counts)
    rows = torch.arange(len(counts), device=counts.device)
    return TargetOutput(output.logits[rows, (counts - 1).clamp(min=0)][:, None], output.features, output.last)


def _read_media(
    state: DecodeState, step: Step, prompts: Sequence[list[int]], stats: GenerationStats, media: Media
) -> Generator[int, None, TargetOutput]:
    """Reads prompts with media, in one eager pass."""
    _begin(state, step, prompts)
    output = read_media(step.target, state.cache, media, feature_layers=step.feature_layers)
    stats.num_target_forwards += 1
    longest = media.longest
    read = _hand_over(state, output, [prompt[1:] for prompt in prompts], media.counts, longest, longest)
    yield longest
    return read


def _hand_over(
    state: DecodeState, output: TargetOutput, following: Sequence[list[int]], counts: Tensor, size: int, longest: int
) -> TargetOutput:
    """Gives the drafter what was read: counts[b] of `size` tokens of each row, and those that follow.

    Args:
        longest: no row holds more tokens now.
    """
    cache, drafter, device = state.cache, state.drafter, state.cache.lengths.device
    if drafter is not None and any(following):
        next_ids, num_slots = _pad(following, size, device)
        view = cache.view_slots(longest).shape[0]
        if state.may_wait and len(following) == len(state.rows) and state.has_room(size):
            if output.features is not None:
                state.hold_features(output.features)
            state.append(next_ids, num_slots, output.features, in_prompt=True)
            state.pending_bound += size
            size = 0
        elif state.pending_bound:
            read_pending(state, drafter, state.pending_bound, view)
            state.pending_bound = 0
        for start in range(0, size, PREFILL_CHUNK):  # more than one where the target reads all of a prompt at once
            part = slice(start, start + PREFILL_CHUNK)
            features = None if output.features is None else output.features[:, part]
            here = (num_slots - start).clamp(0, PREFILL_CHUNK)
            drafter.extend(state.draft, features, next_ids[:, part], here, max_slots=view)
    features = None
    if output.features is not None:
        rows = torch.arange(len(counts), device=device)
        features = output.features[rows, (counts - 1).clamp(min=0)][:, None]
    return TargetOutput(output.logits, features)


def _pad(rows: Sequence[list[int]], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows as [B, size] long, padded on the right, and how many are real [B]."""
    padded = [row + [0] * (size - len(row)) for row in rows]
    return torch.tensor(padded, device=device), torch.tensor([len(row) for row in rows], device=device)
