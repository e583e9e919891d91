"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): fast, and NOT lossless.

Legend: B batch, N tree nodes, K depth, V target vocabulary.
"""

import torch
from torch import Tensor

from draftsmith.inference.acceptance.exact import Acceptance
from draftsmith.inference.acceptance.sampler import Sampler, pick_token
from draftsmith.inference.trees.token_tree import TokenTree


def accept_typical(
    sampler: Sampler,
    tree: TokenTree,
    logits: Tensor,
    root_positions: Tensor,
    *,
    noise: Tensor,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Acceptance:
    """A draft x after accepted drafts is accepted if p(x) > min(epsilon, delta exp(-H(p))), p the target's processed
    distribution and H its entropy. The longest such path is kept, of several the likeliest. The token after it is drawn
    from the target. The thresholds are the paper's.

    Arguments and result as in `accept_exact`; the target samples. No processor may be lazy.
    """
    if sampler.is_lazy:
        raise ValueError(
            f"{', '.join(sampler.lazy_names)} may keep a state, and typical acceptance judges all drafts at once: use "
            "acceptance='exact' or 'rejection'"
        )
    batch, _, vocab = logits.shape
    scores = sampler.process_nodes(tree, logits).float()
    log_p = torch.log_softmax(scores, dim=-1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)  # [B, N]
    threshold = (delta * torch.exp(-entropy)).clamp(max=epsilon)
    parents = tree.parents.clamp(min=0)
    own = log_p.flatten(1).gather(1, parents * vocab + tree.token_ids)  # [B, N], a draft's log p after its parent
    is_draft = tree.parents >= 0
    passes = is_draft & (own.exp() > threshold.gather(1, parents))
    ancestors = tree.ancestors & (tree.depths > 0)[:, None]  # [B, N, N], drafts on the way to each node, and itself
    is_accepted = is_draft & (passes[:, None] | ~ancestors).all(-1)
    path_log_p = torch.where(ancestors, own[:, None], 0.0).sum(-1)
    depths = torch.where(is_accepted, tree.depths, 0)
    longest = depths.amax(1)  # [B]
    is_best = is_accepted & (depths == longest[:, None])
    best = torch.where(is_best, path_log_p, float("-inf")).argmax(1) * (longest > 0)
    rows = torch.arange(batch, device=logits.device)
    path, node = [], best
    for _ in range(tree.path_width):  # from the leaf up to the root
        path.append(node)
        node = parents[rows, node]
    # Entry d of the path is the ancestor of depth d, which stands longest - d steps above the leaf.
    steps = torch.arange(tree.path_width, device=logits.device)
    is_real = steps <= longest[:, None]
    path_BP = torch.stack(path, dim=1).gather(1, (longest[:, None] - steps).clamp(min=0)) * is_real
    bonus = pick_token(scores[rows, best], noise[rows, longest])
    drafted = torch.nn.functional.pad(tree.token_ids.gather(1, path_BP)[:, 1:], (0, 1))
    tokens = drafted.scatter(1, longest[:, None], bonus[:, None])
    kept = scores[rows[:, None], path_BP] if sampler.keeps_scores else None
    return Acceptance(path_BP, longest + 1, tokens * is_real, kept)
