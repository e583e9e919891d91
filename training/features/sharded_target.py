"""A frozen target that no single device holds: its layers split over the processes, which train the heads together.

Each process keeps an equal part of every decoder layer's weights, gathers a layer when it runs and forgets it behind
it. Embedding, final norm and LM head stay whole, because heads and losses use them outside of the target's forward.
Weights that are loaded in the dtype they are stored in stay in the page cache, which a machine's processes share, until
their layer is split: so the host need not have room for a copy for each process.

Whoever runs a split target takes part in a collective: all processes must run the same passes. Batches come evenly, and
the prompts of the acceptance length are decoded by all alike.
"""

from __future__ import annotations

import os
import warnings
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

Sharding = Literal["none", "fsdp2", "zero3"]


def shard_target(model: Any, sharding: Sharding, device: torch.device) -> None:
    """Brings a frozen, whole model to `device`, its layers split over all processes as `sharding` says.

    Raises:
        ValueError: for one process, for quantised weights, or when the layers cannot be told.
    """
    if sharding != "none":
        layers = _find_layers(model)
        world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if world_size == 1:
            raise ValueError(
                f"got shard_target {sharding} in a run of one process, which would hold the whole target all the same: "
                "start several with accelerate launch, or leave it out"
            )
        if not all(weight.is_floating_point() for weight in layers.parameters()):
            raise ValueError(
                f"got shard_target {sharding} for {type(model).__name__} with quantised weights, which cannot be "
                "split: load it in bfloat16, or leave shard_target out"
            )
        (_split_with_fsdp if sharding == "fsdp2" else _split_with_zero)(layers, world_size, device)
    model.to(device)


def is_sharded(model: nn.Module) -> bool:
    """Whether this process keeps but a part of some of the model's weights."""
    return any(local_part(weight) is not weight for weight in model.parameters())


def count_held(model: nn.Module) -> int:
    """How many of a model's parameters this process keeps."""
    return sum(local_part(weight).numel() for weight in model.parameters())


def local_part(weight: Any) -> torch.Tensor:
    """What this process keeps of a weight that FSDP or ZeRO-3 has split; any other tensor itself."""
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


def _split_with_fsdp(layers: nn.ModuleList, world_size: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (world_size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    for layer, following in pairwise(layers):
        layer.register_forward_pre_hook(_GatherAhead(following))


class _GatherAhead:
    """Before a layer runs it asks for the weights of the next one, which then arrive meanwhile."""

    def __init__(self, following: nn.Module) -> None:
        self.following = following

    def __call__(self, layer: nn.Module, args: Any) -> None:
        assert isinstance(self.following, FSDPModule)
        self.following.unshard(async_op=True)


def _split_with_zero(layers: nn.ModuleList, world_size: int, device: torch.device) -> None:
    """ZeRO-3 by its own primitives: an engine around the target would gather by the order of its first pass, and
    embedding and LM head would be split as well."""
    deepspeed = import_deepspeed(device.type)
    deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    for layer in layers:
        weights = list(layer.parameters())
        deepspeed.zero.Init(module=layer, config_dict_or_path=config, dtype=weights[0].dtype)
        gathering = _Gathering(deepspeed, weights)
        layer.register_forward_pre_hook(gathering.begin)
        layer.register_forward_hook(gathering.end, always_call=True)


class _Gathering:
    """The weights of a layer that ZeRO-3 has split, together for as long as the layer runs."""

    def __init__(self, deepspeed: Any, weights: list[nn.Parameter]) -> None:
        self.deepspeed = deepspeed
        self.weights = weights
        self.context: Any = None

    def begin(self, layer: nn.Module, args: Any) -> None:
        self.context = self.deepspeed.zero.GatheredParameters(self.weights)
        self.context.__enter__()

    def end(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.context.__exit__(None, None, None)


def import_deepspeed(device_type: str) -> Any:
    """The package, told of the device it would guess.

    Raises:
        ValueError: when it is not installed.
    """
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)  # DeepSpeed's own calls
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError(
            f"DeepSpeed was asked for and cannot be imported ({error}): pip install 'draftsmith[deepspeed]'"
        ) from error
    if device_type == "cpu":
        # It would compile collectives of its own, which takes a minute and a compiler; gloo has them as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
