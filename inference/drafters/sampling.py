"""From a drafter's scores to candidates, picked as the target will pick its own token.

Exact acceptance uses the best candidates; at temperature > 0 they are ranked with the target's own noise (coupled
drafting). Rules that compare p and q need drafts drawn from q. Siblings are drawn without replacement: the k best of
log q plus Gumbel noise are k such draws, in their order. This noise is independent of the target's, and differs between
nodes and between steps.

Legend: B batch, W frontier nodes of one level, C candidate columns, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.inference.drafters.base import DraftLogits
from draftsmith.inference.noise import derive_seeds, gumbel_noise

# A greedy target picks its most likely token, so the drafter's best token is right more often than q says. Scores at
# this temperature rank the nodes of a dynamic tree better.
GREEDY_TEMPERATURE = 0.7


@dataclass(frozen=True)
class DraftSampling:
    """How candidates are picked from draft scores: as the target will pick its own token.

    Attributes:
        warp: the target's prefix-free logits processors, applied to draft logits [R, C] (arXiv 2211.17192, section 2.2:
            every sampling setting is an adjusted distribution, applied to p and q alike); None = greedy decoding.
        greedy_temperature: of the scores when the target is greedy.
        noise: [B, depth + 1, V] float32 Gumbel noise: entry d is for the token drawn at the nodes of depth d;
            None = greedy, or uncoupled drafting.
        seeds: [B] int64, of this step only: drafts are drawn at random (`draw`), for acceptance rules that compare p
            and q; None = the best candidates.
        vocab_size: V, for drafts drawn at random.
    """

    warp: Callable[[Tensor], Tensor] | None = None
    noise: Tensor | None = None
    seeds: Tensor | None = None
    vocab_size: int = 0
    greedy_temperature: float = GREEDY_TEMPERATURE

    def at_depth(self, depth: int) -> DraftSampling:
        """The same for nodes of one depth only: `noise` is [B, 1, V]."""
        return self if self.noise is None else replace(self, noise=self.noise[:, depth : depth + 1])

    def take_best(self, draft: DraftLogits, top_k: int) -> tuple[Tensor, Tensor]:
        """The best children of nodes of one depth (see `at_depth`): log-scores and target token ids, both
        [B, W or 1, min(top_k, C)]."""
        scores = self.score(draft)
        top, columns = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
        if draft.token_ids is None:
            return top, columns
        if draft.token_ids.dim() == 1:
            return top, draft.token_ids[columns]
        return top, draft.token_ids.gather(-1, columns)

    def score(self, draft: DraftLogits) -> Tensor:
        """Log-scores [B, W or 1, C] float32 of the children of nodes of one depth, normalised over the columns.

        They are log q, at `greedy_temperature` when the target is greedy; coupled drafting adds the target's own Gumbel
        noise (arXiv 2408.07978).
        """
        logits = draft.logits.float()
        if self.warp is not None:
            logits = warp_candidates(self.warp, logits)
        elif self.noise is None:
            logits = logits / self.greedy_temperature
        if self.noise is not None:
            noise_BV = self.noise[:, 0]
            if draft.token_ids is None:
                noise = noise_BV[:, None, :]
            elif draft.token_ids.dim() == 1:
                noise = noise_BV[:, None, draft.token_ids]
            else:
                noise = torch.gather(noise_BV, 1, draft.token_ids.flatten(1)).view_as(draft.token_ids)
            logits = torch.log_softmax(logits, dim=-1) + noise
        return normalise(logits)

    def draw(self, draft: DraftLogits, depth: int, num_ranks: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draws the children of one level's frontier nodes.

        Args:
            depth: of the frontier (root 0).
            num_ranks: children of each node.
            width: W; each node draws by itself, also from scores that all nodes share.

        Returns:
            log_probs: [B, W, min(num_ranks, C)] float32, log q of the children in the order they were drawn; -inf
                where there are no more candidates.
            token_ids: of the same shape, int64.
            log_q: [B, W, V] float32.
        """
        assert self.seeds is not None
        batch, _, columns = draft.logits.shape
        logits = draft.logits.float().expand(batch, width, columns)
        log_q = normalise(logits if self.warp is None else warp_candidates(self.warp, logits))
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
        # Columns of probability 0 may repeat another column's token id.
        full = full.scatter_reduce(-1, ids, log_q, "amax")
        return log_probs, ids.gather(-1, drawn), full


def normalise(logits: Tensor) -> Tensor:
    """Log-probabilities over the columns; -inf at a node without any candidate, which would be NaN."""
    return torch.log_softmax(logits, dim=-1).nan_to_num(nan=float("-inf"), neginf=float("-inf"))


def warp_candidates(warp: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """Draft scores [B, W, C] float32, adjusted. Columns of -inf stay so. Nodes with no other columns are shown to the
    processors as zeros, since some of them fail on such nodes, or allow forbidden tokens there."""
    is_absent = logits.isneginf()
    adjusted = warp(logits.masked_fill(is_absent.all(-1, keepdim=True), 0.0).flatten(0, 1)).view_as(logits)
    return adjusted.masked_fill(is_absent, float("-inf"))
