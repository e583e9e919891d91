"""TokenTree: drafted continuations that share their prefixes, verified by one forward pass of the target.

Legend: B batch, N tree nodes, I nodes with children, K depth, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.inference.targets.masks import Nodes


@dataclass(frozen=True)
class DrawnFrom:
    """Where a tree's drafts were drawn from.

    Attributes:
        log_q: [B, I, V] float32, the drafter's log-probabilities at the nodes that have children.
        rows: [N] long, each node's row of `log_q`; 0 for nodes without children.
        num_ranks: the most children a node has.
    """

    log_q: Tensor
    rows: Tensor
    num_ranks: int


@dataclass
class TokenTree(Nodes):
    """A tree of drafted tokens per row, in an order where a parent stands before its children.

    Node 0 is the root: the last accepted token, not yet in the KV cache, depth 0, parent -1. Rows with fewer nodes
    are padded with nodes without a parent: parent -1, depth 0, any valid token id, log-probability -inf. These nodes
    see only themselves and are never accepted.

    Worked example: after "the", the drafts "cat sat", "cat ran" and "dog":

        node        0     1     2     3     4
        token       the   cat   dog   sat   ran
        parents    -1     0     0     1     1
        depths      0     1     1     2     2

        ancestors   0: 1 0 0 0 0
                    1: 1 1 0 0 0
                    2: 1 0 1 0 0
                    3: 1 1 0 1 0
                    4: 1 1 0 0 1

    Attributes:
        log_probs: [B, N] float32, the drafter's log-probability of the path from the root to the node (root 0).
        drawn: where the drafts were drawn from; None if they were not drawn at random.
    """

    log_probs: Tensor
    drawn: DrawnFrom | None = None

    @classmethod
    def from_root(cls, token_ids: Tensor) -> TokenTree:
        """The tree of plain decoding: nothing is drafted after the root tokens [B]."""
        zeros = torch.zeros_like(token_ids)[:, None]
        return cls(token_ids[:, None], zeros - 1, zeros, zeros.float(), max_depth=0)

    @classmethod
    def from_prompts(cls, token_ids: Tensor, counts: Tensor) -> TokenTree:
        """Each row's first `counts` [B] of the tokens [B, N] as a chain; the others are padding."""
        nodes = torch.arange(token_ids.shape[1], device=token_ids.device)
        is_real = nodes < counts[:, None]
        parents, depths = torch.where(is_real, nodes - 1, -1), torch.where(is_real, nodes, 0)
        return cls(token_ids, parents, depths, torch.zeros_like(depths, dtype=torch.float))

    @property
    def num_nodes(self) -> int:
        """Nodes per row N, root and padding included."""
        return self.token_ids.shape[1]

    def measure_depths(self) -> list[int]:
        """Drafted levels of each row; of rows that share no budget of nodes, those of the deepest."""
        if self.widths is None:
            return [self.path_width - 1] * len(self.token_ids)
        depths: list[int] = self.depths.amax(1).tolist()
        return depths

    @property
    def path_width(self) -> int:
        """Nodes of the longest possible path K + 1, root included."""
        deepest = self.num_nodes - 1
        return 1 + (deepest if self.max_depth is None else min(deepest, self.max_depth))


def mask_absent(tree: TokenTree) -> TokenTree:
    """Turns nodes of score -inf (the drafter had no such candidate) into padding, which has no parent."""
    absent = tree.log_probs.isneginf()
    parents, depths = tree.parents.masked_fill(absent, -1), tree.depths.masked_fill(absent, 0)
    return replace(tree, parents=parents, depths=depths)
