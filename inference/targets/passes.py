"""What a pass of the target reads and gives.

Legend: B batch, N tokens of a pass, V target vocabulary, F feature width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
class TargetOutput:
    """logits: [B, N, V] in the model's dtype. features: [B, N, F], or None when no layers were asked for."""

    logits: Tensor
    features: Tensor | None
