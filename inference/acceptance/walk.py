"""The target's processed scores along a walk down a tree, for all rows at once.

Legend: B batch, N tree nodes, V target vocabulary, L length of a row's text up to the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inference.acceptance.sampler import Sampler

# Processed scores [B, V] at the current nodes [B], behind the tokens emitted so far (each [B]), of rows that still walk
# [B] (of others: anything).
WalkScores = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]


def score_walk(sampler: Sampler, logits: Tensor, prefixes: Sequence[Tensor] | None) -> WalkScores:
    """Scores as plain decoding would process them.

    Processors that are prefix-free run on all rows. Others run on rows that still walk alone, once per token that is
    asked for: those that keep no state on all texts of one length together, any other on each row by itself. Such a
    call reads on the host, once, which rows walk.

    Args:
        logits: [B, N, V] the target's.
        prefixes: per row [1, L] long, its tokens up to and including the root; needed unless all are prefix-free.
    """
    rows = torch.arange(logits.shape[0], device=logits.device)
    if sampler.is_prefix_free:
        return lambda current, tokens, walks: sampler.process(logits[rows, current])
    if prefixes is None:
        names = ", ".join(sampler.reading_names)
        raise ValueError(f"{names} may read the text so far: give prefixes, one [1, L] tensor per row")

    def score(current: Tensor, tokens: Sequence[Tensor], walks: Tensor) -> Tensor:
        scores = logits[rows, current].float()
        behind = torch.stack([*tokens], dim=1) if tokens else rows[:, None][:, :0]
        walking = [row for row, walks_on in enumerate(walks.tolist()) if walks_on]
        for members in _group(sampler, walking, prefixes):
            texts = torch.cat([prefixes[row] for row in members])
            index = torch.tensor(members, device=rows.device)
            own = sampler if sampler.keeps_nothing else sampler.for_row(members[0], len(prefixes))
            scores[index] = own.process(scores[index], torch.cat([texts, behind[index]], dim=1))
        return scores

    return score


def _group(sampler: Sampler, walking: Sequence[int], prefixes: Sequence[Tensor]) -> list[list[int]]:
    """Rows that go through the processors together."""
    if not sampler.keeps_nothing:
        return [[row] for row in walking]
    by_length: dict[int, list[int]] = {}
    for row in walking:
        by_length.setdefault(prefixes[row].shape[1], []).append(row)
    return list(by_length.values())


def may_emit(
    sampler: Sampler, rows: Tensor, count: int, tokens: Sequence[Tensor], max_tokens: Sequence[int] | None
) -> Tensor:
    """Which rows [B] bool processors that read the prefix may be asked about, with `count` tokens emitted so far.

    Args:
        rows: [B], of the right device; tokens: emitted so far, each [B]; max_tokens: per row, None = no limit.
    """
    may = torch.ones_like(rows, dtype=torch.bool)
    if sampler.is_prefix_free:
        return may
    if max_tokens is not None:
        may = may & (torch.tensor(max_tokens, device=rows.device) > count)
    if tokens and sampler.eos_token_ids:
        may = may & ~torch.isin(tokens[-1], torch.tensor(sorted(sampler.eos_token_ids), device=rows.device))
    return may
