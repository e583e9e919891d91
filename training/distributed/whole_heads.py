"""Whole heads where FSDP or ZeRO-3 has split them over the processes: to decode with, and to save.

Both strategies gather weights only while `forward` runs; decoding calls `extend` and `expand`. Every function here is
collective: all processes must call it, at the same step.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from draftsmith.heads import DraftHeads, DraftHeadsConfig
from draftsmith.heads.registration import find_kind


def is_split(module: nn.Module) -> bool:
    """Whether each process keeps only a part of the weights."""
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
    """`heads` themselves, or if they are split a whole copy, bound to the same target and in eval mode."""
    if not is_split(heads):
        return heads
    state = gather_state(heads)
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights on the CPU, which are then overwritten
        copy: Any = find_kind(heads.config.head_type)(cast(DraftHeadsConfig, heads.config))
    copy.to(device=heads.target.device, dtype=next(t.dtype for t in state.values() if t.is_floating_point()))
    copy.load_state_dict(state)
    copy.token_counts = heads.token_counts
    return cast(DraftHeads, copy.eval().bind(heads.target))
