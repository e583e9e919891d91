"""Acceptance by comparing probabilities: token rejection over siblings.

It gives the target's distribution exactly. It needs drafts that were drawn from q (`drafters/sampling.py`), and noise
that is independent of the drafts' noise. Unlike with exact acceptance, the text depends on the drafts; its distribution
does not.

Legend: B batch, N tree nodes, K depth, P = K + 1, V target vocabulary.
"""

import torch
from torch import Tensor

from draftsmith.inference.acceptance.exact import Acceptance, TreeWalk
from draftsmith.inference.acceptance.sampler import Sampler, pick_token
from draftsmith.inference.noise import derive_seeds, uniform_noise
from draftsmith.inference.trees.token_tree import TokenTree

# Streams of `derive_seeds`: of the drafts, and of the draws that accept them.
DRAFT_STREAM, ACCEPT_STREAM = 1, 2


def accept_by_rejection(
    sampler: Sampler,
    tree: TokenTree,
    logits: Tensor,
    root_positions: Tensor,
    *,
    noise: Tensor,
) -> Acceptance:
    """At each node, child after child: accepted with chance min(1, p(x) / q(x)); if not, p becomes the normalised
    max(0, p - q), and q leaves the child out (arXiv 2211.17192, section 2.3; siblings: arXiv 2402.14160, algorithm 1).
    The token after the last accepted node is drawn from the p that is left.

    Arguments and result as in `accept_exact`; the target samples.
    """
    assert tree.drawn is not None
    assert sampler.row_seeds is not None
    walk, width, num_ranks = TreeWalk(sampler, logits), tree.path_width, tree.drawn.num_ranks
    nodes = torch.arange(tree.num_nodes, device=logits.device)
    seeds = derive_seeds(sampler.row_seeds, ACCEPT_STREAM, root_positions)
    uniforms = uniform_noise(seeds, width * num_ranks).view(-1, width, num_ranks)
    for depth in range(width):
        p = torch.softmax(walk.score().float(), dim=-1)  # [B, V]
        log_q = tree.drawn.log_q[walk.rows, tree.drawn.rows[walk.current]]
        is_child = (tree.parents == walk.current[:, None]) & (nodes > 0)
        chosen, is_chosen, p = _try_children(tree, p, log_q, is_child, uniforms[:, depth])
        bonus = pick_token(p.log(), noise[:, depth])
        drafted = tree.token_ids.gather(1, chosen[:, None])[:, 0]
        walk.step(torch.where(is_chosen, drafted, bonus), chosen, is_chosen)
    return walk.acceptance()


def _try_children(
    tree: TokenTree, p: Tensor, log_q: Tensor, is_child: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Judges the children of one node in each row, one after another.

    Args:
        p: [B, V] the target's distribution; log_q: [B, V] the drafter's; is_child: [B, N] bool.
        uniforms: [B, ranks] one draw for each child.

    Returns:
        the accepted child [B] (0: none), whether there is one [B], and what p has become [B, V].
    """
    places = is_child.cumsum(1)  # 1 = the first child
    chosen = torch.zeros_like(places[:, 0])
    is_chosen = torch.zeros_like(is_child[:, 0])
    for rank in range(uniforms.shape[1]):
        # In logarithms: after the likeliest tokens of a sharp q, less may be left than a float can hold.
        q = torch.softmax(log_q, dim=-1).nan_to_num(nan=0.0)  # rows of -inf become zeros
        fits = is_child & (places == rank + 1)
        child, exists = fits.int().argmax(1), fits.any(1) & ~is_chosen
        token = tree.token_ids.gather(1, child[:, None])  # [B, 1]
        q_token, p_token = q.gather(1, token)[:, 0], p.gather(1, token)[:, 0]
        accepts = exists & (uniforms[:, rank] * q_token < p_token)
        chosen, is_chosen = torch.where(accepts, child, chosen), is_chosen | accepts
        left = (p - q).clamp(min=0)
        total = left.sum(-1, keepdim=True)  # 0 only from rounding: then p stays
        p = torch.where((exists & ~accepts)[:, None] & (total > 0), left / total.clamp(min=1e-38), p)
        log_q = log_q.scatter(1, token, float("-inf"))
    return chosen, is_chosen, p
