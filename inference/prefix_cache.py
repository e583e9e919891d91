"""Which tokens of new prompts a state holds already, from an earlier call or from rows that run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.inference.cache.kv_cache import KVCache
from draftsmith.inference.drafters.base import PREFILL_CHUNK
from draftsmith.inference.state import DecodeState


@dataclass(frozen=True)
class PrefixHit:
    """The part of some prompts that need not be read again.

    Attributes:
        cache, draft: hold the keys and values, and the drafter's state, of the beginnings.
        rows: per prompt, the row that holds most of it.
        num_cached: per prompt, how many of its tokens are not read again.
    """

    cache: KVCache
    draft: Any
    rows: list[int]
    num_cached: list[int]


def match(
    state: DecodeState, prompts: Sequence[list[int]], *, room: int, needs_all: bool = True, least: int = 1
) -> PrefixHit | None:
    """The part of the prompts that a state holds; None if there is no such part.

    At least one token is always read, because its logits are needed. With a drafter, slot k - 1 pairs token k with a
    feature that is gone, so k tokens are kept only if the next token is the same, too. The drafter first reads what
    waits in the state, if the prompts begin as its texts do.

    Args:
        room: as in `leave_room`.
        needs_all: whether a part of some prompts is of no use without a part of the others.
        least: a shorter beginning is not worth it.
    """
    if not state.is_whole or state.has_media:  # placeholders do not tell images apart
        return None
    texts = [row.text for row in state.rows]
    shared = [[count_shared([text, prompt]) for text in texts] for prompt in prompts]
    if max((count for row in shared for count in row), default=0) < least:
        return None
    state.is_whole = False  # while the drafter reads
    state.catch_up(state.cache.view_slots(max(row.num_committed for row in state.rows)).shape[0])
    state.is_whole = True
    committed = state.cache.lengths.tolist()  # 0 of rows that have forgotten theirs
    read = committed if state.drafter is None else (state.cache.lengths - state.num_pending).tolist()
    rows, kept = [], []
    for prompt, counts in zip(prompts, shared, strict=True):
        lengths = []
        for count, length, num_read in zip(counts, committed, read, strict=True):
            own = min(count, length, len(prompt) - 1)
            lengths.append(max(0, own if state.drafter is None else min(own, count - 1, num_read)))
        kept.append(max(lengths))
        rows.append(lengths.index(kept[-1]))
    # Recurrent targets may read prompts in one chunk.
    kept = leave_room(kept, prompts, room, room if state.cache.states is not None else PREFILL_CHUNK)
    # Recurrent states are held for a few lengths only.
    kept = [state.cache.held_length(row, count) for row, count in zip(rows, kept, strict=True)]
    if max(kept) < least or (needs_all and not all(kept)):
        return None
    return PrefixHit(state.cache, state.draft, rows, kept)


def count_shared(texts: Sequence[list[int]]) -> int:
    """The number of tokens that all texts begin with.

    >>> count_shared([[5, 6, 7], [5, 6], [5, 6, 8]])
    2
    """
    first, last = min(texts), max(texts)  # in the order of a dictionary
    pairs = enumerate(zip(first, last, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(last)))


def leave_room(kept: Sequence[int], prompts: Sequence[list[int]], room: int, chunk: int = PREFILL_CHUNK) -> list[int]:
    """Lowers the kept tokens of long rows: while they wait for rows with more to read, a chunk's padding would run over
    the end of the cache, or of the positions.

    >>> leave_room([250, 0], [[1] * 254, [2] * 100], room=256)
    [156, 0]
    """
    longest = max(len(prompt) - count for prompt, count in zip(prompts, kept, strict=True))
    return [min(count, room - min(chunk, longest)) for count in kept]
