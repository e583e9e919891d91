"""NewSlots: certain slots that the drafter has not seen.

Legend: B batch, S slots, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.cache.tree_cache import pick_rows


@dataclass(frozen=True)
class NewSlots:
    """Certain slots that the drafter has not read yet.

    Attributes:
        features: [B, S, F] the target's features, or None when the drafter reads none.
        next_ids: [B, S] int64, the tokens one position later.
        counts: [B] int64, how many slots of each row are real.
    """

    features: Tensor | None
    next_ids: Tensor
    counts: Tensor

    @property
    def width(self) -> int:
        """S."""
        return self.next_ids.shape[1]

    @property
    def last_ids(self) -> Tensor:
        """[B] each row's last real token: the root of its next tree."""
        return self.next_ids.gather(1, (self.counts - 1).clamp(min=0)[:, None])[:, 0]

    def select(self, rows: Sequence[int]) -> NewSlots:
        """The slots of these rows."""
        return self.map(lambda values: pick_rows(values, rows))

    def add(self, others: NewSlots) -> NewSlots:
        """These rows, and then others, padded to one width."""
        width = max(self.width, others.width)
        parts = [part.map(lambda values: _pad_slots(values, width)) for part in (self, others)]
        features = None
        if self.features is not None:
            features = torch.cat([part.features for part in parts if part.features is not None])
        return NewSlots(features, torch.cat([part.next_ids for part in parts]), torch.cat([self.counts, others.counts]))

    def map(self, function: Callable[[Tensor], Tensor]) -> NewSlots:
        """The slots with `function` of each tensor."""
        features = None if self.features is None else function(self.features)
        return NewSlots(features, function(self.next_ids), function(self.counts))


def _pad_slots(values: Tensor, width: int) -> Tensor:
    """`values` [B, S, ...] with zeros up to [B, width, ...]; [B] as it is."""
    if values.dim() == 1 or values.shape[1] == width:
        return values
    return torch.cat([values, values.new_zeros(values.shape[0], width - values.shape[1], *values.shape[2:])], dim=1)


def join_slots(waiting: Sequence[NewSlots], width: int) -> NewSlots:
    """All waiting slots of each row side by side, oldest first, padded to `width` if there are fewer.

    Worked example, one row: slots [a, b] of which 1 is real, then [c, d] of which 2 are, width 3:

        next_ids [a, c, d, -]      counts 3
    """
    total = sum(slots.width for slots in waiting)
    if len(waiting) == 1 and total >= width:
        return waiting[0]
    first = waiting[0]
    batch, columns = first.next_ids.shape[0], max(total, width)
    counts = torch.zeros_like(first.counts)
    rows = torch.arange(batch, device=counts.device)[:, None]
    next_ids = first.next_ids.new_zeros(batch, columns)
    features = None if first.features is None else first.features.new_zeros(batch, columns, first.features.shape[-1])
    for slots in waiting:  # the next real slots overwrite a row's padding
        places = counts[:, None] + torch.arange(slots.width, device=counts.device)
        next_ids.index_put_((rows, places), slots.next_ids)
        if features is not None and slots.features is not None:
            features.index_put_((rows, places), slots.features)
        counts = counts + slots.counts
    return NewSlots(features, next_ids, counts)
