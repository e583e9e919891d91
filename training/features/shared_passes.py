"""States from a target that is split by tensor parallelism (`--shard_target tp`).

Each process computes a part of every matrix product, so all must read the same batch. Yet each trains on its own: the
processes run the batch of every process in turn, and each keeps the states of its own batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from draftsmith.heads.modules.host_tensors import read_on_host, send
from draftsmith.training.features.sources import OnlineFeatures, TargetStates


@dataclass(frozen=True, eq=False)
class SharedPasses:
    """Runs the target on the batches of all processes, which must call it equally often."""

    online: OnlineFeatures

    def __call__(self, batch: Mapping[str, Any]) -> TargetStates:
        ids: Tensor = batch["input_ids"]
        masks = [name for name in ("attention_mask", "document_ids") if name in batch]
        own = torch.stack([ids, *(send(read_on_host(batch[name]), ids.device) for name in masks)])
        own_rank = torch.distributed.get_rank()
        shape = torch.tensor(own.shape, device=own.device)
        shapes = [torch.empty_like(shape) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(shapes, shape)
        states = {}
        for rank, size in enumerate(torch.stack(shapes).tolist()):
            shared = own if rank == own_rank else own.new_empty(size)
            torch.distributed.broadcast(shared, src=rank)
            found = self.online(dict(zip(["input_ids", *masks], shared, strict=True)))
            if rank == own_rank:
                states[rank] = found
        return states[own_rank]
