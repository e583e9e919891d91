"""Acceptance by comparing probabilities: token rejection over siblings, and block verification of chains.

Both give the target's distribution exactly. They need drafts that were drawn from q (`drafters/sampling.py`), and noise
that is independent of the drafts' noise. Unlike with exact acceptance, the text depends on the drafts; its distribution
does not.

Legend: B batch, N tree nodes, K depth, P = K + 1, V target vocabulary.
"""

from __future__ import annotations

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
    walk, width, num_ranks = TreeWalk(sampler, logits), tree.path_width, tree.drawn.num_ranks
    nodes = torch.arange(tree.num_nodes, device=logits.device)
    uniforms = _uniforms(sampler, root_positions, width * num_ranks).view(-1, width, num_ranks)
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
        q = _normalise_log(log_q)
        fits = is_child & (places == rank + 1)
        child, exists = fits.int().argmax(1), fits.any(1) & ~is_chosen
        token = tree.token_ids.gather(1, child[:, None])  # [B, 1]
        q_token, p_token = q.gather(1, token)[:, 0], p.gather(1, token)[:, 0]
        accepts = exists & (uniforms[:, rank] * q_token < p_token)
        chosen, is_chosen = torch.where(accepts, child, chosen), is_chosen | accepts
        rejects = (exists & ~accepts)[:, None]
        p = torch.where(rejects, _normalise((p - q).clamp(min=0), p), p)
        log_q = log_q.scatter(1, token, float("-inf"))
    return chosen, is_chosen, p


def accept_blocks(
    sampler: Sampler,
    tree: TokenTree,
    logits: Tensor,
    root_positions: Tensor,
    *,
    noise: Tensor,
) -> Acceptance:
    """Block verification (arXiv 2403.10444, algorithm 2) of a chain: all drafts are judged together, and in expectation
    no fewer are accepted than by token rejection.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the first i drafts pass with chance
    R_i / (R_i + 1 - w_i), R_i = sum over x of max(0, w_i p(x) - q(x)) at the i-th draft (the last one: w_i). The
    longest prefix that passes is accepted.

    Arguments and result as in `accept_by_rejection`. No processor may be lazy, because all drafts are scored, accepted
    or not.
    """
    if sampler.is_lazy:
        raise ValueError(
            f"{', '.join(sampler.lazy_names)} may keep a state, and block verification asks about drafts that it "
            "may not accept: use acceptance='exact' or 'rejection'"
        )
    assert tree.drawn is not None
    num_drafts = tree.num_nodes - 1
    rows = torch.arange(logits.shape[0], device=logits.device)
    scores = sampler.process_nodes(tree, logits)
    p = torch.softmax(scores.float(), dim=-1)
    q = _extend(tree.drawn.log_q.exp()[:, tree.drawn.rows[:num_drafts]])  # [B, N, V]; nothing after the last draft
    drafts = tree.token_ids[:, 1:, None]  # [B, N - 1, 1]
    ratio = (p[:, :-1].gather(-1, drafts) / q[:, :-1].gather(-1, drafts).clamp(min=1e-38))[..., 0]
    ratio = ratio.masked_fill(tree.parents[:, 1:] < 0, 0.0)  # padding is never accepted
    uniforms = _uniforms(sampler, root_positions, num_drafts)
    weight = torch.ones_like(ratio[:, 0])
    weights, length = [weight], torch.zeros_like(root_positions)
    for place in range(num_drafts):
        weight = (weight * ratio[:, place]).clamp(max=1.0)
        weights.append(weight)
        rest = (weight[:, None] * p[:, place + 1] - q[:, place + 1]).clamp(min=0).sum(-1)
        passes = weight if place == num_drafts - 1 else rest / (rest + 1.0 - weight).clamp(min=1e-38)
        length = torch.where(uniforms[:, place] < passes, place + 1, length)
    scale = torch.stack(weights, dim=1)[rows, length]
    last = p[rows, length]
    left = _normalise((scale[:, None] * last - q[rows, length]).clamp(min=0), last)
    bonus = pick_token(left.log(), noise[rows, length])
    steps = torch.arange(tree.num_nodes, device=logits.device)
    is_real = steps <= length[:, None]
    tokens = _extend(tree.token_ids[:, 1:, None])[..., 0].scatter(1, length[:, None], bonus[:, None])
    kept = scores.float() if sampler.keeps_scores else None
    return Acceptance(steps * is_real, length + 1, tokens * is_real, kept)


def _uniforms(sampler: Sampler, root_positions: Tensor, count: int) -> Tensor:
    assert sampler.row_seeds is not None
    return uniform_noise(derive_seeds(sampler.row_seeds, ACCEPT_STREAM, root_positions), count)


def _normalise(values: Tensor, otherwise: Tensor) -> Tensor:
    """Rows [B, V] that sum to one; a row of zeros (from rounding) becomes the row of `otherwise`."""
    total = values.sum(-1, keepdim=True)
    return torch.where(total > 0, values / total.clamp(min=1e-38), otherwise)


def _normalise_log(log_values: Tensor) -> Tensor:
    """Logarithms of any scale [B, V] as probabilities; rows of -inf become zeros."""
    return torch.softmax(log_values, dim=-1).nan_to_num(nan=0.0)


def _extend(values: Tensor) -> Tensor:
    """One more entry of zeros at the end of dimension 1 of [B, N, X]."""
    return torch.nn.functional.pad(values, (0, 0, 0, 1))
