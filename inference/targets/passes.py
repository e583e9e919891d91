"""What a pass of the target reads and gives.

Legend: B batch, N tokens of a pass, V target vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Nodes(Protocol):
    """What `Target.verify` reads of a `TokenTree`, whose docstring explains it."""

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def parents(self) -> Tensor: ...
    @property
    def depths(self) -> Tensor: ...
    @property
    def ancestors(self) -> Tensor: ...


@dataclass(frozen=True)
class TreeNodes:
    """Nodes of trees for `Target.verify` (see `Nodes`).

    Attributes:
        token_ids, parents, depths: [B, N] long.
        ancestors: [B, N, N] bool; a node counts as its own ancestor.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor

    @classmethod
    def of(cls, token_ids: Tensor, parents: Sequence[int]) -> TreeNodes:
        """The tree in which node i follows node parents[i] < i, or the text (-1). Each row has tokens of its own."""
        ancestors, depths = torch.eye(len(parents), dtype=torch.bool), [0] * len(parents)
        for node, parent in enumerate(parents):
            if parent >= 0:
                ancestors[node] |= ancestors[parent]
                depths[node] = depths[parent] + 1
        shared = (torch.tensor(parents), torch.tensor(depths), ancestors)
        return cls(token_ids, *(x.to(token_ids.device).expand(len(token_ids), *x.shape) for x in shared))


@dataclass(frozen=True)
class TargetOutput:
    """logits: [B, N, V] in the model's dtype. features: [B, N, F], or None when no layers were asked for."""

    logits: Tensor
    features: Tensor | None
