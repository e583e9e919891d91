"""The acceptance rules a decoder knows by name."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from draftsmith.inference.acceptance.exact import Acceptance, accept_exact
from draftsmith.inference.acceptance.rejection import accept_by_rejection
from draftsmith.inference.acceptance.typical import accept_typical
from draftsmith.inference.trees.policy import TreePolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AcceptanceRule:
    """Which drafted tokens a verify step keeps.

    Attributes:
        accept: a function of tensors like `accept_exact`. It judges sampled drafts only: a greedy target and a tree of
            the root only get `accept_exact`.
        may_couple: drafts may be chosen with the target's own noise. Only for a rule that accepts a draft exactly if it
            is the token that the target draws.
        draws_drafts: drafts must be drawn at random from q, with noise that is not the target's. The shape of the tree
            must be fixed, because choosing nodes by their drafts would change the distribution.
        is_lossless: whether the text keeps the target's distribution.
    """

    name: str
    accept: Callable[..., Acceptance]
    may_couple: bool = False
    draws_drafts: bool = False
    is_lossless: bool = True

    def check(self, policy: TreePolicy | None) -> None:
        """Raises ValueError for trees that this rule cannot judge; warns if it is lossy."""
        if not self.is_lossless:
            logger.warning("acceptance=%r is lossy: texts do not keep the target's distribution", self.name)
        if policy is None:
            return
        if self.draws_drafts and not policy.has_fixed_shape:
            raise ValueError(
                f"acceptance={self.name!r} needs a tree whose shape does not depend on what was drafted, and the tree "
                f"is a {type(policy).__name__}: use tree='chain', a list of rank paths or a tree file, or "
                "acceptance='exact'"
            )
        if self.draws_drafts and policy.skips_ranks:
            raise ValueError(
                f"acceptance={self.name!r} needs all siblings before each one, and the tree has a node without its "
                "siblings of lower rank: add them"
            )


EXACT = AcceptanceRule("exact", accept_exact, may_couple=True)
RULES = {
    "exact": EXACT,
    "rejection": AcceptanceRule("rejection", accept_by_rejection, draws_drafts=True),
    "typical": AcceptanceRule("typical", accept_typical, is_lossless=False),
}


def resolve_rule(acceptance: AcceptanceRule | str) -> AcceptanceRule:
    """The rule of a name; ValueError for an unknown name."""
    if isinstance(acceptance, AcceptanceRule):
        return acceptance
    if acceptance not in RULES:
        raise ValueError(f"acceptance is {acceptance!r}; allowed are {', '.join(RULES)}, or an AcceptanceRule")
    return RULES[acceptance]
