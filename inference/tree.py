"""TokenTree: drafted continuations that share their prefixes, verified by one forward pass of the target.

Legend: B batch, N tree nodes, K depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class TokenTree:
    """A tree of drafted tokens per row, in an order where a parent stands before its children.

    Node 0 is the root: the last accepted token, not yet in the KV cache, depth 0, parent -1. Rows with fewer nodes
    are padded with nodes that hang on nothing: parent -1, depth 0, any valid token id, log-probability -inf.

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
        token_ids: [B, N] long.
        parents: [B, N] long, node indices.
        depths: [B, N] long, edges between the root and the node.
        log_probs: [B, N] float32, the drafter's log-probability of the path from the root to the node (root 0).
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor

    @property
    def num_nodes(self) -> int:
        """Nodes per row N, root and padding included."""
        return self.token_ids.shape[1]

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool: row i is True at j if j is i or an ancestor of i."""
        return compute_ancestors(self.parents)


def compute_ancestors(parents: Tensor) -> Tensor:
    """Reflexive, transitive closure of `parents` [..., N] (-1 = none) as bool [..., N, N]; see TokenTree's example.

    Squares the one-step relation, so it takes log2(N) small matrix products whatever the depths are.
    """
    num_nodes = parents.shape[-1]
    nodes = torch.arange(num_nodes, device=parents.device)
    reach = ((parents[..., None] == nodes) | (nodes[:, None] == nodes)).float()  # self and parent
    for _ in range(max(num_nodes - 1, 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0.5
