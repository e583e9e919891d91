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
from transformers.generation import logits_process

from inference.noise import gumbel_noise
from inference.tree import TokenTree


def _find_types(*names: str) -> frozenset[type]:
    """The named processor classes, as far as the installed transformers release has them."""
    return frozenset(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# Read one row of scores and nothing else.
PREFIX_FREE = _find_types(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TopHLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)
# These adjust a distribution whatever its columns mean, so they may shape scores over a reduced draft vocabulary too.
_COLUMN_FREE = PREFIX_FREE - _find_types("SuppressTokensLogitsProcessor")


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
    """

    path: Tensor
    counts: Tensor
    next_tokens: Tensor


class Sampler:
    """How the target picks a token: its logits processors, then argmax, with keyed Gumbel noise when sampling.

    Processors whose exact type is in PREFIX_FREE look at one row of scores only, so they may run on all rows at once.
    Any other may read the prefix or keep a state (a grammar), so it runs as in plain decoding: once per emitted token,
    in order, on each row alone.
    """

    def __init__(
        self,
        processors: Iterable[Callable[[Any, Any], Any]] = (),
        *,
        do_sample: bool = False,
        row_seeds: Tensor | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """
        Args:
            processors: transformers logits processors (a LogitsProcessorList), in order.
            do_sample: sample from the processed distribution; otherwise take its argmax.
            row_seeds: [B] long from `noise.row_seeds`; required to sample.
            eos_token_ids: tokens that end a row: processors that are not prefix-free are not asked beyond them.
        """
        if do_sample and row_seeds is None:
            raise ValueError("sampling needs row_seeds: noise.row_seeds(seed, batch_size, device)")
        self.processors = tuple(processors)
        self.do_sample = do_sample
        self.row_seeds = row_seeds
        self.eos_token_ids = frozenset(eos_token_ids)
        types = {type(processor) for processor in self.processors}
        self.is_prefix_free = types <= PREFIX_FREE
        self._row_samplers: dict[int, Sampler] = {}
        self._draft_warpers = tuple(
            processor for processor in self.processors if do_sample and type(processor) in _COLUMN_FREE
        )

    def for_row(self, row: int, batch_size: int) -> Sampler:
        """This sampler for one row of a batch: processors that read the prefix are copied, so that what they keep of
        a row stays with it, and settings they hold per row are cut to it."""
        if batch_size == 1:
            return self
        if row not in self._row_samplers:
            processors = []
            for processor in self.processors:
                if type(processor) not in PREFIX_FREE:
                    own: Any = copy.copy(processor)
                    ignored = getattr(own, "prompt_ignore_length", None)  # of RepetitionPenaltyLogitsProcessor
                    if isinstance(ignored, Tensor) and ignored.numel() == batch_size:
                        own.prompt_ignore_length = ignored.reshape(batch_size, -1)[row]
                    processor = own
                processors.append(processor)
            self._row_samplers[row] = Sampler(processors, eos_token_ids=self.eos_token_ids)
        return self._row_samplers[row]

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

        Which drafts are proposed does not change the text, so processors that need the prefix are left out.
        """
        return self._apply(self._draft_warpers, None, logits)

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
            prefix-free; such a step asks the host once per emitted token.
        max_tokens: per row, how many tokens it may still emit (0: a finished row, whose counts are then 0); only keeps
            those processors from being asked for more.

    Returns:
        Acceptance; for a prefix-free sampler without any host synchronisation.
    """
    if sampler.do_sample and noise is None:
        noise = sampler.draw_noise(root_positions, tree.path_width, logits.shape[-1])
    if not sampler.is_prefix_free:
        if prefixes is None:
            names = sorted({type(p).__name__ for p in sampler.processors if type(p) not in PREFIX_FREE})
            raise ValueError(f"{', '.join(names)} may read the text so far: give prefixes, one [1, L] tensor per row")
        return _walk_lazily(sampler, tree, logits, noise, prefixes, max_tokens)
    return _walk_by_depth(sampler, tree, logits, noise)


def _walk_by_depth(sampler: Sampler, tree: TokenTree, logits: Tensor, noise: Tensor | None) -> Acceptance:
    """Draw at one node per row and depth, for every depth of the tree, so that the host is never asked."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    num_nodes = tree.num_nodes
    nodes = torch.arange(num_nodes, device=logits.device)
    current = torch.zeros_like(rows)
    is_walking = torch.ones_like(rows, dtype=torch.bool)
    path, tokens, walked = [], [], []
    for depth in range(tree.path_width):
        scores = sampler.process(logits[rows, current])  # [B, V]
        token = (scores if noise is None else scores + noise[:, depth]).argmax(-1)  # [B]
        path.append(current)
        tokens.append(token)
        walked.append(is_walking)
        fits = (tree.parents == current[:, None]) & (tree.token_ids == token[:, None])  # [B, N]
        child = torch.where(fits, nodes, num_nodes).amin(-1)  # the first that fits
        is_walking = is_walking & (child < num_nodes)
        current = child % num_nodes
    is_real = torch.stack(walked, dim=1)  # [B, K+1]
    return Acceptance(torch.stack(path, dim=1) * is_real, is_real.sum(1), torch.stack(tokens, dim=1) * is_real)


def _walk_lazily(
    sampler: Sampler,
    tree: TokenTree,
    logits: Tensor,
    noise: Tensor | None,
    prefixes: Sequence[Tensor],
    max_tokens: Sequence[int] | None,
) -> Acceptance:
    """As plain decoding would: all processors, once per emitted token, on the row's own text so far."""
    batch, width = logits.shape[0], tree.path_width
    path = torch.zeros((batch, width), dtype=torch.long)
    tokens = torch.zeros((batch, width), dtype=torch.long)
    counts = torch.zeros(batch, dtype=torch.long)
    token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
    for row in range(batch):
        prefix = prefixes[row]
        row_sampler = sampler.for_row(row, batch)
        limit = width if max_tokens is None else min(width, max_tokens[row])
        node: int | None = 0
        for depth in range(limit):
            if node is None:
                break
            scores = row_sampler.process(logits[row, node][None], prefix)
            drawn = (scores if noise is None else scores + noise[row, depth]).argmax(-1, keepdim=True)  # [1, 1]
            token = int(drawn)
            path[row, depth], tokens[row, depth] = node, token
            counts[row] += 1
            if token in sampler.eos_token_ids:
                break
            prefix = torch.cat([prefix, drawn], dim=1)
            node = _find_child(token_ids[row], parents[row], node, token)
    return Acceptance(path.to(logits.device), counts.to(logits.device), tokens.to(logits.device))


def _find_child(token_ids: list[int], parents: list[int], node: int, token: int) -> int | None:
    """The first child of `node` that carries `token`, or None."""
    for child, parent in enumerate(parents):
        if parent == node and token_ids[child] == token:
            return child
    return None
