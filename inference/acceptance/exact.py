"""Exact acceptance: draw the target's own next token at every node, then walk along the drafts that carry it.

At each node the target's processed distribution gives one token: the argmax of its log-probabilities, plus Gumbel
noise keyed by (row seed, absolute position) when sampling. If a child carries that token the walk steps there; if none
does, it is the bonus token and the walk ends. So the text is a function of (target, seed) alone, whatever was drafted.

Only the nodes of the walk are drawn at, one per depth. Drawing at all nodes first gives the same path, but top-p on a
tree of 32 nodes then costs five times as much (it sorts every row), and even an argmax of all rows costs more on a CPU.

Legend: B batch, N tree nodes, K depth, V target vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference.acceptance.target_scores import WalkScores, may_emit, score_walk
from inference.noise import gumbel_noise
from inference.request.processors import COLUMN_FREE, KEEPS_NOTHING, NEEDS_CANDIDATES, NO_TOKEN, PREFIX_FREE
from inference.request.row_processors import processors_of_row
from inference.trees.token_tree import TokenTree


@dataclass(frozen=True)
class Acceptance:
    """What one verify step accepted.

    Worked example, the tree of TokenTree's docstring, when the target says "cat" after the root, "ran" after "cat" and
    "away" after "ran":

        path         0  1  4      the root, "cat", "ran"
        counts       3
        next_tokens  cat  ran  away

    Attributes:
        path: [B, K+1] long, accepted nodes, root first; entries from counts[b] on are 0 (padding).
        counts: [B] long, nodes on the path, root included (>= 1). It is also the number of tokens emitted.
        next_tokens: [B, K+1] long, accepted drafted tokens, then the bonus token; entries from counts[b] on are 0.
            `NO_TOKEN` where none could be picked.
        scores: [B, K+1, V] float32, the target's processed scores that gave the tokens (from counts[b] on:
            anything), if the sampler keeps them.
    """

    path: Tensor
    counts: Tensor
    next_tokens: Tensor
    scores: Tensor | None = None


def pick_token(scores: Tensor, noise: Tensor | None = None) -> Tensor:
    """The token with the largest score [..., V] (plus noise), or `NO_TOKEN`: [...] long."""
    # torch takes NaN for the largest of all values.
    best, token = (scores if noise is None else scores + noise).max(-1)
    return torch.where(best > float("-inf"), token, NO_TOKEN)


class Sampler:
    """How the target picks a token: its logits processors, then argmax, with keyed Gumbel noise when sampling.

    Processors whose exact type is in PREFIX_FREE look at one row of scores only, so they may run on all rows at once.
    Those in KEEPS_NOTHING also read the row's text. Any other may keep a state (a grammar), so it runs as in plain
    decoding: once per emitted token, in order, on each row alone.

    Attributes:
        is_prefix_free: all processors are in PREFIX_FREE.
        keeps_nothing: all are in one of the two.
        reading_names: the types that are not in PREFIX_FREE.
        rows: for a sampler of some of a batch's `num_rows`, which of them they are (`select`); None = all.
    """

    def __init__(
        self,
        processors: Iterable[Callable[[Any, Any], Any]] = (),
        *,
        do_sample: bool = False,
        row_seeds: Tensor | None = None,
        eos_token_ids: Iterable[int] = (),
        keeps_scores: bool = False,
    ) -> None:
        """
        Args:
            processors: transformers logits processors (a LogitsProcessorList), in order.
            do_sample: sample from the processed distribution; otherwise take its argmax.
            row_seeds: [B] long from `noise.row_seeds`; required to sample.
            eos_token_ids: tokens that end a row: processors that are not prefix-free are not asked beyond them.
            keeps_scores: rules hand over the scores (`Acceptance.scores`).
        """
        if do_sample and row_seeds is None:
            raise ValueError("sampling needs row_seeds: noise.row_seeds(seed, batch_size, device)")
        self.processors = tuple(processors)
        self.do_sample = do_sample
        self.row_seeds = row_seeds
        self.eos_token_ids = frozenset(eos_token_ids)
        self.keeps_scores = keeps_scores
        self.rows: tuple[int, ...] | None = None
        self.num_rows = 0
        types = {type(processor) for processor in self.processors}
        self.is_prefix_free = types <= PREFIX_FREE
        # A repetition penalty may hold a setting per row, as a tensor.
        has_rows = any(isinstance(getattr(p, "prompt_ignore_length", None), Tensor) for p in self.processors)
        self.keeps_nothing = types <= PREFIX_FREE | KEEPS_NOTHING and not has_rows
        self.reading_names = sorted(kind.__name__ for kind in types - PREFIX_FREE)
        self._row_samplers: dict[int, Sampler] = {}
        self._draft_warpers = tuple(
            processor for processor in self.processors if do_sample and type(processor) in COLUMN_FREE
        )
        self._needs_candidates = bool({type(warper) for warper in self._draft_warpers} & NEEDS_CANDIDATES)

    def select(self, rows: Sequence[int], batch_size: int) -> Sampler:
        """This sampler for the rows `rows` of the `batch_size` it has now, with whatever its processors remember of
        them."""
        chosen = copy.copy(self)
        if self.rows is None:
            chosen.rows, chosen.num_rows = tuple(rows), batch_size
        else:
            chosen.rows = tuple(self.rows[row] for row in rows)
        if self.row_seeds is not None:
            chosen.row_seeds = self.row_seeds[list(rows)]
        return chosen

    def for_row(self, row: int, batch_size: int) -> Sampler:
        """This sampler for one row of a batch: processors that read the prefix are the row's own (see
        `row_processors`)."""
        if batch_size == 1 and self.rows is None:
            return self
        # In the batch as it was given.
        number, num_rows = (row, batch_size) if self.rows is None else (self.rows[row], self.num_rows)
        if number not in self._row_samplers:
            reading = [processor for processor in self.processors if type(processor) not in PREFIX_FREE]
            own = iter(processors_of_row(reading, number, num_rows))
            processors = [one if type(one) in PREFIX_FREE else next(own) for one in self.processors]
            self._row_samplers[number] = Sampler(processors, eos_token_ids=self.eos_token_ids)
        return self._row_samplers[number]

    def draw_noise(self, root_positions: Tensor, num_depths: int, vocab_size: int) -> Tensor | None:
        """Noise of a step's draws: [B, num_depths, V] float32, or None when greedy.

        Entry d belongs to the token drawn at nodes of depth d, which stands at position root + d + 1. The same tensor
        serves coupled drafting and acceptance.
        """
        if not self.do_sample or self.row_seeds is None:
            return None
        steps = torch.arange(1, num_depths + 1, device=root_positions.device)
        return gumbel_noise(self.row_seeds, root_positions[:, None] + steps, vocab_size)

    def warp_draft(self, logits: Tensor) -> Tensor:
        """Draft scores [R, C] adjusted as the target's are (arXiv 2211.17192, section 2.2), by the processors that may.

        Left out are those that read the prefix, which would be asked about every drafted node, and those that name
        tokens, of which columns know nothing: tokens they forbid may be drafted, and are never accepted. No rule needs
        q to be processed as p is, only that drafts come from the q it is told.
        """
        if not self._needs_candidates:
            return self._apply(self._draft_warpers, None, logits)
        is_absent = logits.isneginf()
        filled = logits.masked_fill(is_absent.all(-1, keepdim=True), 0.0)
        return self._apply(self._draft_warpers, None, filled).masked_fill(is_absent, float("-inf"))

    def process(self, logits: Tensor, prefix_ids: Tensor | None = None) -> Tensor:
        """All processors in order on scores [R, V] in float32; `prefix_ids` [R, L] for those that read it."""
        if not self.processors:
            return logits
        return self._apply(self.processors, prefix_ids, logits.to(torch.float32, copy=True))

    @staticmethod
    def _apply(processors: Sequence[Callable[[Any, Any], Any]], prefix_ids: Tensor | None, scores: Tensor) -> Tensor:
        if prefix_ids is None:
            prefix_ids = torch.zeros((scores.shape[0], 1), dtype=torch.long, device=scores.device)
        for processor in processors:
            scores = processor(prefix_ids, scores)
        return scores


def accept_exact(
    sampler: Sampler,
    tree: TokenTree,
    logits: Tensor,
    root_positions: Tensor,
    *,
    noise: Tensor | None = None,
    prefixes: Sequence[Tensor] | None = None,
    max_tokens: Sequence[int] | None = None,
) -> Acceptance:
    """Walk down the tree along the target's own tokens.

    Args:
        sampler: how the target picks tokens.
        tree: what was verified.
        logits: [B, N, V] the target's logits at every node, any floating dtype.
        root_positions: [B] long, absolute position of node 0 (the cache's lengths at the time of the verify step).
        noise: what `sampler.draw_noise` gave for at least `tree.path_width` depths; made here when None.
        prefixes: per row [1, L] long, its tokens up to and including the root. Needed only by processors that are not
            prefix-free.
        max_tokens: per row, how many tokens it may still emit (0: a finished row, whose counts are then 0); only keeps
            those processors from being asked for more.

    Returns:
        Acceptance; for a prefix-free sampler without any host synchronisation, otherwise with one per depth.
    """
    if sampler.do_sample and noise is None:
        noise = sampler.draw_noise(root_positions, tree.path_width, logits.shape[-1])
    return _walk(sampler, tree, score_walk(sampler, logits, prefixes), noise, max_tokens)


def _walk(
    sampler: Sampler, tree: TokenTree, score: WalkScores, noise: Tensor | None, max_tokens: Sequence[int] | None
) -> Acceptance:
    """Draw at one node per row and depth, for every depth of the tree, so that the host is never asked where to go."""
    num_nodes = tree.num_nodes
    nodes = torch.arange(num_nodes, device=tree.token_ids.device)
    current = torch.zeros_like(tree.token_ids[:, 0])
    is_walking = may_emit(sampler, current, 0, [], max_tokens)
    path: list[Tensor] = []
    tokens: list[Tensor] = []
    walked: list[Tensor] = []
    kept: list[Tensor] = []
    for depth in range(tree.path_width):
        row_scores = score(current, tokens, is_walking)  # [B, V]
        token = pick_token(row_scores, None if noise is None else noise[:, depth])  # [B]
        if sampler.keeps_scores:
            kept.append(row_scores.float())
        path.append(current)
        tokens.append(token)
        walked.append(is_walking)
        fits = (tree.parents == current[:, None]) & (tree.token_ids == token[:, None])  # [B, N]
        child = torch.where(fits, nodes, num_nodes).amin(-1)  # the first that fits
        is_walking = is_walking & (child < num_nodes) & may_emit(sampler, current, depth + 1, tokens, max_tokens)
        current = child % num_nodes
    is_real = torch.stack(walked, dim=1)  # [B, K+1]
    scores = torch.stack(kept, dim=1) if kept else None
    return Acceptance(torch.stack(path, dim=1) * is_real, is_real.sum(1), torch.stack(tokens, dim=1) * is_real, scores)
