"""Drafts drawn from the drafter's own distribution, for acceptance rules that compare it with the target's.

Siblings are drawn without replacement: the k best of log q plus Gumbel noise are k such draws, in their order. The
noise is independent of the target's, of every other node's, and of every other step's.

Legend: B batch, W frontier nodes of one level, C candidate columns, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.drafters.base import DraftLogits, warp_candidates
from inference.noise import derive_seeds, gumbel_noise


@dataclass(frozen=True)
class DraftDraws:
    """How one step's drafts are drawn.

    Attributes:
        seeds: [B] long, of this step alone.
        vocab_size: V.
        warp: as in `DraftSampling`.
    """

    seeds: Tensor
    vocab_size: int
    warp: Callable[[Tensor], Tensor] | None = None

    def draw(self, draft: DraftLogits, depth: int, num_ranks: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draws the children of one level's frontier nodes.

        Args:
            depth: of the frontier (root 0).
            num_ranks: children of each node.
            width: W; scores that all nodes share are drawn from by each of them alone.

        Returns:
            log_probs: [B, W, min(num_ranks, C)] float32, log q of the children in the order they were drawn; -inf
                where there are no more candidates.
            token_ids: of the same shape, long.
            log_q: [B, W, V] float32.
        """
        batch, _, columns = draft.logits.shape
        logits = draft.logits.float().expand(batch, width, columns)
        if self.warp is not None:
            logits = warp_candidates(self.warp, logits)
        log_q = torch.log_softmax(logits, dim=-1).nan_to_num(nan=float("-inf"), neginf=float("-inf"))
        nodes = torch.arange(width, device=log_q.device)
        seeds = derive_seeds(self.seeds[:, None].expand(batch, width), depth, nodes)  # [B, W]
        places = torch.zeros(batch * width, 1, dtype=torch.long, device=log_q.device)
        noise = gumbel_noise(seeds.flatten(), places, columns).view(batch, width, columns)
        drawn = (log_q + noise).topk(min(num_ranks, columns), dim=-1).indices
        log_probs = log_q.gather(-1, drawn)
        if draft.token_ids is None:
            return log_probs, drawn, log_q
        ids = draft.token_ids.expand(batch, width, columns)
        full = log_q.new_full((batch, width, self.vocab_size), float("-inf"))
        # Columns without a chance may repeat a token id, and must not overwrite the one that has it.
        full = full.scatter_reduce(-1, ids, log_q, "amax")
        return log_probs, ids.gather(-1, drawn), full
