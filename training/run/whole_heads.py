"""Heads whose weights FSDP or ZeRO-3 has split over the processes, put together: to decode with, and to save.

Both put them together only while `forward` runs; decoding calls `extend` and `expand`. Every function here is a
collective: all processes must call it, at the same step.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from heads import HEAD_TYPES, DraftHeads, DraftHeadsConfig


def is_split(module: nn.Module) -> bool:
    """Whether a process keeps only a part of the weights (of FSDP's, all of them may lie together for a moment)."""
    return isinstance(module, FSDPModule) or any(hasattr(weight, "ds_id") for weight in module.parameters())


def gather_state(heads: nn.Module) -> dict[str, Tensor]:
    """The state dict with whole tensors, on every process; tensors that are not split are not copied."""
    partitioned = [weight for weight in heads.parameters() if hasattr(weight, "ds_id")]
    if partitioned:
        import deepspeed

        with deepspeed.zero.GatheredParameters(partitioned):
            return {name: tensor.detach().clone() for name, tensor in heads.state_dict().items()}
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in heads.state_dict().items()
    }


@torch.no_grad()
def whole_heads(heads: DraftHeads) -> DraftHeads:
    """`heads` themselves, or where they are split a whole copy, bound to the same target and in eval mode."""
    if not is_split(heads):
        return heads
    state = gather_state(heads)
    with torch.random.fork_rng(devices=[]):  # on the CPU first weights are drawn, and overwritten
        copy: Any = HEAD_TYPES[heads.config.head_type](cast(DraftHeadsConfig, heads.config))
    copy.to(device=heads.target.device, dtype=next(t.dtype for t in state.values() if t.is_floating_point()))
    copy.load_state_dict(state)
    return cast(DraftHeads, copy.eval().bind(heads.target))
