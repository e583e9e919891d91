"""Splits a frozen target that is too large for one device over the processes that train the heads.

Each process keeps an equal part of every decoder layer's weights (FSDP2), gathers a layer when it runs and frees it
afterwards. The processes of a machine load the target one after the other, so that the host needs room for one copy.

Embedding and LM head stay whole, because heads and losses use them outside the target's forward.

Every forward of a split target is a collective: all processes must run the same passes.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Splits the layers of a frozen, whole model over all processes, and moves it to their devices.

    Raises:
        ValueError: quantised weights, or no list of layers in the model.
    """
    layers = _find_layers(model)
    if not all(weight.is_floating_point() for weight in layers.parameters()):
        raise ValueError(
            f"got shard_target fsdp2 for {type(model).__name__} with quantised weights, which cannot be "
            "split: load it in bfloat16, or leave shard_target out"
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    for layer, following in pairwise(layers):
        layer.register_forward_pre_hook(partial(_gather_ahead, following))
    model.to(mesh.device_type)


def is_sharded(model: nn.Module) -> bool:
    """Whether this process keeps only a part of some of the model's weights."""
    return any(local_part(weight) is not weight for weight in model.parameters())


def count_held(model: nn.Module) -> int:
    """Counts the parameters of a model that this process keeps."""
    return sum(local_part(weight).numel() for weight in model.parameters())


def local_part(weight: Any) -> torch.Tensor:
    """Returns this process's part of a weight that FSDP or ZeRO-3 has split; any other tensor itself."""
    part: torch.Tensor = weight.to_local() if isinstance(weight, DTensor) else getattr(weight, "ds_tensor", weight)
    return part


def _find_layers(model: Any) -> nn.ModuleList:
    total = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().children():
        if isinstance(module, nn.ModuleList) and len(module) == total:
            return module
    raise ValueError(
        f"{type(model).__name__} holds no list of its {total} layers, so it cannot be split: leave shard_target out"
    )


def _gather_ahead(following: nn.Module, layer: nn.Module, args: Any) -> None:
    """A pre-hook of `layer` that starts to gather the weights of the next one."""
    assert isinstance(following, FSDPModule)
    following.unshard(async_op=True)
