"""TreePolicy: decides which of a drafter's candidates become nodes of the tree that the target verifies.

Legend: B batch, N tree nodes (root included), W frontier nodes of one level, C candidate columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.sampling import DraftSampling
from draftsmith.inference.trees.token_tree import TokenTree


class TreePolicy(ABC):
    """Grows one tree a step.

    Attributes:
        max_depth: the deepest level it can reach.
        num_nodes: nodes of its trees, root included.
        num_scratch: frontier nodes (nodes whose children are scored by `expand`) of all levels together.
        has_fixed_shape: whether the shape of its trees does not depend on what is drafted.
        skips_ranks: whether a node may stand in its trees without its better siblings.
        level_functions: names of attributes, functions of tensors that `grow` calls: a runner may put others there.
    """

    max_depth: int
    num_nodes: int
    num_scratch: int
    has_fixed_shape: bool = False
    skips_ranks: bool = False
    level_functions: tuple[str, ...] = ()

    @property
    def usual_nodes(self) -> int:
        """Nodes of a row that a step verifies, about."""
        return self.num_nodes

    @property
    def is_chain(self) -> bool:
        """Whether node i is always the child of node i - 1."""
        return False

    @property
    def is_narrow(self) -> bool:
        """Whether no level has more than one node whose children are drafted."""
        return self.num_scratch < self.max_depth

    @abstractmethod
    def grow(
        self,
        drafter: Drafter,
        state: Any,
        root_ids: Tensor,
        draft: DraftLogits,
        sampling: DraftSampling,
    ) -> TokenTree:
        """Drafts the tree, level by level.

        Args:
            root_ids: [B] the last accepted tokens.
            draft: scores of the root's children, as `drafter.extend` returned them.
            sampling: how scores become candidates.
        """

    def limit_depth(self, max_depth: int | None) -> TreePolicy:
        """This policy for a drafter that proposes at most `max_depth` levels.

        Raises:
            ValueError: when its shape asks for more levels.
        """
        if max_depth is not None and self.max_depth > max_depth:
            raise ValueError(
                f"the tree is {self.max_depth} levels deep, the drafter proposes at most {max_depth}: "
                "use a shallower tree, or heads with more levels"
            )
        return self
