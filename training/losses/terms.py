"""Losses by name, and mixtures of them: `distillation`, or `1.8*total_variation+0.1*cross_entropy`.

Legend: M scored positions, C draft vocabulary, D hidden size. At a position q is the draft's distribution and p the
target's, both over the C columns of the draft vocabulary; x is the data's token.

Each function maps `ScoredTokens` to losses [M]; a mixture shares the softmaxes. KL(p || q) is the cross-entropy minus
the entropy of p, a constant: `kl` and `distillation` have the same gradient.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

TOP_K = 10  # HASS (arXiv 2408.15766, section 3.1)
LK_DECAY = 3.0  # eta of LK (arXiv 2602.23881): how fast the KL fades as acceptance grows


@dataclass(frozen=True)
class ScoredTokens:
    """The inputs of a loss at M positions.

    Attributes:
        logits: [M, C] of the draft, float32 (tests: float64), with gradients.
        teacher_logits: [M, C] of the target, any floating dtype, -inf allowed; None if no loss reads them.
        label: [M] int64, draft index of x; -1 outside the draft vocabulary.
        argmax: [M] int64, draft index of the target's most likely token; -1 outside.
        hidden, target_hidden: [M, D], the input of the draft's head and of the target's LM head.
    """

    logits: Tensor
    teacher_logits: Tensor | None
    label: Tensor
    argmax: Tensor
    hidden: Tensor
    target_hidden: Tensor

    @cached_property
    def log_q(self) -> Tensor:
        return self.logits.log_softmax(-1)

    @cached_property
    def q(self) -> Tensor:
        return self.log_q.exp()

    @cached_property
    def log_p(self) -> Tensor:
        assert self.teacher_logits is not None
        return self.teacher_logits.to(self.logits.dtype).log_softmax(-1)

    @cached_property
    def p(self) -> Tensor:
        assert self.teacher_logits is not None
        return self.teacher_logits.to(self.logits.dtype).softmax(-1)

    @cached_property
    def overlap(self) -> Tensor:
        """[M], sum of min(p, q) = 1 - TV(p, q): the acceptance of a token drawn from q (arXiv 2211.17192, thm. 3.5)."""
        return torch.minimum(self.p, self.q).sum(-1)


def cross_entropy(tokens: ScoredTokens) -> Tensor:
    """-log q(x), 0 where x is outside the draft vocabulary (Medusa, arXiv 2401.10774, section 2.2.1)."""
    return F.nll_loss(tokens.log_q, tokens.label, ignore_index=-1, reduction="none")


def argmax_cross_entropy(tokens: ScoredTokens) -> Tensor:
    """-log q(argmax p): a hard label, the token that a greedy target accepts."""
    return F.nll_loss(tokens.log_q, tokens.argmax, ignore_index=-1, reduction="none")


def distillation(tokens: ScoredTokens) -> Tensor:
    """-sum p log q, soft cross-entropy (EAGLE, arXiv 2401.15077, section 3.2; EAGLE-3)."""
    return -(tokens.p * tokens.log_q).sum(-1)


def topk_distillation(tokens: ScoredTokens) -> Tensor:
    """-sum of p log q over the target's `TOP_K` best tokens, not renormalised: a term to add to another loss (HASS,
    arXiv 2408.15766, section 3.1)."""
    best = tokens.p.topk(min(TOP_K, tokens.p.shape[-1]), dim=-1)
    return -(best.values * tokens.log_q.gather(-1, best.indices)).sum(-1)


def kl(tokens: ScoredTokens) -> Tensor:
    """KL(p || q) = sum p (log p - log q), with the gradient of `distillation`."""
    return distillation(tokens) + torch.xlogy(tokens.p, tokens.p).sum(-1)


def reverse_kl(tokens: ScoredTokens) -> Tensor:
    """KL(q || p) = sum q (log q - log p): favours the target's best tokens (MiniLLM, arXiv 2306.08543). Finite: log p
    is clamped to the logarithm of the smallest normal number, -87.3 in float32."""
    least = math.log(torch.finfo(tokens.logits.dtype).tiny)
    return (tokens.q * (tokens.log_q - tokens.log_p.clamp(min=least))).sum(-1)


def total_variation(tokens: ScoredTokens) -> Tensor:
    """sum |p - q| / 2, from 0 to 1: the chance of a rejection (DistillSpec, arXiv 2310.08461; DSpark, arXiv 2607.05147,
    eq. 10, counts it twice)."""
    return 0.5 * (tokens.p - tokens.q).abs().sum(-1)


def lk_alpha(tokens: ScoredTokens) -> Tensor:
    """-log of the acceptance sum min(p, q) (LK, arXiv 2602.23881): TV's gradient divided by the acceptance, which
    does not vanish where little is accepted. Computed in logs, so that a tiny acceptance gives a finite loss."""
    return -torch.minimum(tokens.log_p, tokens.log_q).logsumexp(-1)


def lk_lambda(tokens: ScoredTokens) -> Tensor:
    """lambda KL(p || q) + (1 - lambda) TV(p, q), lambda = exp(-3 acceptance) of the position, without gradient (LK,
    arXiv 2602.23881): KL where little is accepted, TV where much is."""
    share = torch.exp(-LK_DECAY * tokens.overlap.detach())
    return share * kl(tokens) + (1 - share) * total_variation(tokens)


def smooth_l1(tokens: ScoredTokens) -> Tensor:
    """SmoothL1 between the draft's states and the target's, mean over D (EAGLE, arXiv 2401.15077, section 3.2)."""
    dtype = tokens.logits.dtype
    distance = F.smooth_l1_loss(tokens.hidden.to(dtype), tokens.target_hidden.to(dtype), reduction="none")
    return distance.mean(-1)


@dataclass(frozen=True)
class Loss:
    """function: losses [M]. reads: the data's token, the target's best one, its distribution, or its states."""

    function: Callable[[ScoredTokens], Tensor]
    reads: Literal["label", "argmax", "distribution", "states"]


LOSSES = {
    "cross_entropy": Loss(cross_entropy, "label"),
    "argmax_cross_entropy": Loss(argmax_cross_entropy, "argmax"),
    "distillation": Loss(distillation, "distribution"),
    "topk_distillation": Loss(topk_distillation, "distribution"),
    "kl": Loss(kl, "distribution"),
    "reverse_kl": Loss(reverse_kl, "distribution"),
    "total_variation": Loss(total_variation, "distribution"),
    "lk_alpha": Loss(lk_alpha, "distribution"),
    "lk_lambda": Loss(lk_lambda, "distribution"),
    "smooth_l1": Loss(smooth_l1, "states"),
}


@dataclass(frozen=True)
class LossMixture:
    """Weighted losses, name -> weight."""

    weights: dict[str, float]

    def __call__(self, tokens: ScoredTokens) -> Tensor:
        terms = [weight * LOSSES[name].function(tokens) for name, weight in self.weights.items()]
        return torch.stack(terms).sum(0)

    @property
    def reads(self) -> set[str]:
        return {LOSSES[name].reads for name in self.weights}

    @property
    def needs_distribution(self) -> bool:
        return "distribution" in self.reads

    @property
    def reads_labels_only(self) -> bool:
        return "label" in self.reads <= {"label", "states"}

    def label_of(self, label: Tensor, argmax: Tensor) -> Tensor:
        """The data's token if the loss reads only that; otherwise the target's best token."""
        return label if self.reads_labels_only else argmax

    def has_loss(self, label: Tensor, argmax: Tensor) -> Tensor:
        """Returns, as bool, which positions have a loss: those whose `label_of` is in the draft vocabulary."""
        return self.label_of(label, argmax) >= 0


@lru_cache
def parse_loss(loss_type: str) -> LossMixture:
    """Reads `NAME` or `WEIGHT*NAME+WEIGHT*NAME...`, with or without spaces; a weight left out is 1.

    >>> parse_loss("smooth_l1 + 0.1*distillation").weights
    {'smooth_l1': 1.0, 'distillation': 0.1}

    Raises:
        ValueError: an unknown name (naming the nearest), a weight that is not a positive number, or a name given twice.
    """
    weights: dict[str, float] = {}
    for term in loss_type.split("+"):
        factor, star, name = term.rpartition("*")
        name = name.strip()
        if name not in LOSSES:
            near = difflib.get_close_matches(name, LOSSES, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"loss_type is {loss_type!r}, and there is no loss {name!r}; did you mean {near!r}? Allowed are "
                f"{', '.join(LOSSES)}, and mixtures such as 'smooth_l1+0.1*distillation'"
            )
        try:
            weight = float(factor) if star else 1.0
        except ValueError:
            weight = 0.0
        if not 0 < weight < math.inf:
            raise ValueError(
                f"loss_type is {loss_type!r}, and the weight {factor.strip()!r} of {name} is not above 0; write "
                "WEIGHT*NAME+WEIGHT*NAME, for example 'smooth_l1+0.1*distillation'"
            )
        if name in weights:
            raise ValueError(f"loss_type is {loss_type!r}, which names {name} twice; add its weights up")
        weights[name] = weight
    return LossMixture(weights)
