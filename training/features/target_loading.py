"""Loads the frozen target: on the heads' device, or spread over several devices or processes."""

import copy
import os
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.integrations import deepspeed as integration
from transformers.utils import logging as transformers_logging

from draftsmith.heads import DraftHeads
from draftsmith.heads.kinds.mtp import MTPHeads
from draftsmith.inference import Target
from draftsmith.inference.shared_swaps import SharedSwap
from draftsmith.inference.targets.files import load_causal_lm, read_config
from draftsmith.inference.targets.model_config import find_auto_class
from draftsmith.training.distributed.waiting import one_process_at_a_time
from draftsmith.training.features.sharded_target import split_layers
from draftsmith.training.features.target_options import ModelArguments, PlacementArguments


def loading_whole() -> SharedSwap:
    """A context in which models that are loaded stay whole on every process, also under ZeRO-3 and FSDP.

    transformers' `from_pretrained` would split them under ZeRO-3, the frozen target included. Under FSDP with
    `fsdp_cpu_ram_efficient_loading` (accelerate's default) it would leave them empty on all processes but the first.
    """
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return SharedSwap(integration, "_hf_deepspeed_config_weak_ref", None)


def load_model(
    model_args: ModelArguments, placement: PlacementArguments, device: torch.device, *, num_processes: int
) -> Any:
    """Loads the frozen causal LM straight onto `device`, or spread as `placement` says.

    Raises:
        ValueError: a device map with several processes; a target that cannot be split as `placement` says.
    """
    device_map = placement.parse_device_map()
    if device_map is not None and num_processes > 1:
        raise ValueError(
            f"got target_device_map {placement.target_device_map} with {num_processes} processes, each of which would "
            "spread a whole target over the same devices: start one process, split the target over the processes "
            "(--shard_target fsdp2), or train from stored features"
        )
    if placement.shard_target == "fsdp2":
        if num_processes == 1:
            raise ValueError(
                "got shard_target fsdp2 in a run of one process, which would hold the whole target anyway: start "
                "several with accelerate launch, or leave it out"
            )
        mesh = init_device_mesh(device.type, (num_processes,))
        with one_process_at_a_time():
            model = _load(model_args)
            split_layers(model, mesh)
            return model
    return _load(model_args, device_map={"": device} if device_map is None and device.type != "cpu" else device_map)


def _load(model_args: ModelArguments, **options: Any) -> Any:
    with loading_whole():
        model: Any = load_causal_lm(
            model_args.target,
            dtype=model_args.target_dtype,
            attn_implementation=model_args.attn_implementation,
            trust_remote_code=model_args.trust_remote_code,
            **options,
        )
    return model.requires_grad_(False).eval()


def load_published_heads(model_args: ModelArguments, target: Target) -> DraftHeads:
    """The heads of `init_heads` in another project's format, bound to the target and in float32. Where `init_heads` is
    the target, they are the MTP modules in its own checkpoint."""
    assert model_args.init_heads is not None
    with loading_whole():
        if model_args.init_heads == model_args.target:  # reads the modules only, not the whole target once more
            heads: DraftHeads = MTPHeads.from_target_checkpoint(model_args.target, target)
        else:
            heads = DraftHeads.from_pretrained(model_args.init_heads, target=target)
    return cast(DraftHeads, cast(nn.Module, heads).float())


class FirstLayers(Target):
    """A target of which only the first layers are in memory, besides embedding, final norm and LM head.

    Its config and `num_layers` are those of the whole target.

    Attributes:
        num_loaded: the layers in memory.
    """

    def __init__(self, model: Any, text_config: Any) -> None:
        super().__init__(model)
        self.num_loaded = self.num_layers
        self.text_config, self.num_layers = text_config, text_config.num_hidden_layers

    def drop_layers(self) -> None:
        """Frees the memory of the layers, which are not needed any more."""
        for child in self._causal_lm.get_decoder().children():
            if isinstance(child, nn.ModuleList) and len(child) == self.num_loaded:
                del child[:]
        self.num_loaded = 0


def load_first_layers(model_args: ModelArguments, num_layers: int, device: torch.device | str = "cpu") -> FirstLayers:
    """Loads up to `num_layers` layers of the target; the others are not read."""
    whole = read_config(model_args.target, trust_remote_code=model_args.trust_remote_code)
    config = copy.deepcopy(whole)
    text_config: Any = config.get_text_config()
    total = text_config.num_hidden_layers
    num_layers = min(num_layers, total)
    for key, value in vars(text_config).items():
        if isinstance(value, list) and len(value) == total:  # one entry for each layer
            setattr(text_config, key, value[:num_layers])
    text_config.num_hidden_layers = num_layers
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it would warn of the layers that are left out
    try:
        model = _load(model_args, auto_class=find_auto_class(config), config=config)
    finally:
        transformers_logging.set_verbosity(level)
    return FirstLayers(model.to(device), whole.get_text_config())


def check_placement(target: Target, device: torch.device) -> None:
    """Raises ValueError when the token embedding is not on the device where the heads train."""
    if (target.device.type, target.device.index or 0) != (device.type, device.index or 0):
        raise ValueError(
            f"the device map keeps the target's token embedding on {target.device}, and the heads train on {device}: "
            "map it there, or train there (--use_cpu true for the CPU)"
        )
