"""Splits a frozen target that is too large for one device over the processes that train the heads.

Each process keeps an equal part of every decoder layer's weights, gathers a layer when it runs and frees it afterwards.
Embedding, final norm and LM head stay whole, because heads and losses use them outside the target's forward. Weights
that load in their stored dtype stay in the page cache, which the processes of a machine share, until their layer is
split: so the host does not need room for one copy per process.

Every forward of a split target is a collective: all processes must run the same passes.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

Sharding = Literal["none", "fsdp2"]


def shard_target(model: Any, sharding: Sharding, device: torch.device) -> None:
    """Moves a frozen, whole model to `device`; with `fsdp2`, its layers are split over all processes.

    Raises:
        ValueError: one process, quantised weights, or no list of layers in the model.
    """
    if sharding != "none":
        layers = _find_layers(model)
        world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if world_size == 1:
            raise ValueError(
                f"got shard_target {sharding} in a run of one process, which would hold the whole target anyway: "
                "start several with accelerate launch, or leave it out"
            )
        if not all(weight.is_floating_point() for weight in layers.parameters()):
            raise ValueError(
                f"got shard_target {sharding} for {type(model).__name__} with quantised weights, which cannot be "
                "split: load it in bfloat16, or leave shard_target out"
            )
        _split(layers, world_size, device)
    model.to(device)


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


def _split(layers: nn.ModuleList, world_size: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (world_size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    for layer, following in pairwise(layers):
        layer.register_forward_pre_hook(partial(_gather_ahead, following))


def _gather_ahead(following: nn.Module, layer: nn.Module, args: Any) -> None:
    """A pre-hook of `layer` that starts to gather the weights of the next one."""
    assert isinstance(following, FSDPModule)
    following.unshard(async_op=True)


def import_deepspeed(device_type: str) -> Any:
    """Imports DeepSpeed and tells it the device, which it would guess.

    Raises:
        ValueError: it is not installed.
    """
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)  # in DeepSpeed's own code
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError(f"DeepSpeed cannot be imported ({error}): pip install 'draftsmith[deepspeed]'") from error
    if device_type == "cpu":
        # Otherwise it compiles its own collectives, which takes a minute and a compiler; gloo has them as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
