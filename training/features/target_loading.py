"""Loading the frozen target: on the device that the heads train on, or spread over several devices or processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import deepspeed as integration

from heads.adapter import find_adapter_of, load_adapter
from inference import Target
from training.features.sharded_target import shard_target
from training.features.target_options import ModelArguments, PlacementArguments


@contextmanager
def loading_whole() -> Iterator[None]:
    """Models that are loaded here are whole on every process, under ZeRO-3 and FSDP as well.

    transformers' `from_pretrained` would split them under ZeRO-3, the frozen target included, and under FSDP with
    `fsdp_cpu_ram_efficient_loading` (accelerate's default) leave them empty on all processes but the first.
    """
    found = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = found


def load_model(
    model_args: ModelArguments, placement: PlacementArguments, device: torch.device, *, num_processes: int
) -> Any:
    """The frozen causal LM, on `device` or spread as `placement` says.

    Raises:
        ValueError: a device map with several processes.
    """
    device_map = placement.parse_device_map()
    options: dict[str, Any] = {}
    if device_map is not None:
        if num_processes > 1:
            raise ValueError(
                f"got target_device_map {placement.target_device_map} with {num_processes} processes, each of which "
                "would spread a whole target over the same devices: start one process, or split the target over the "
                "processes (--shard_target fsdp2), or train from stored features"
            )
        if isinstance(device_map, dict) and "" in device_map and len(device_map) > 1:
            device_map = _name_the_rest(device_map, model_args)
        options = {"device_map": device_map, "offload_folder": placement.target_offload_folder}
    with loading_whole():
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_args.target,
            dtype=model_args.target_dtype,
            attn_implementation=model_args.attn_implementation,
            trust_remote_code=model_args.trust_remote_code,
            **options,
        )
    model.requires_grad_(False).eval()
    if device_map is None:
        shard_target(model, placement.shard_target, device)
    return model


def load_adapted_model(
    model_args: ModelArguments, placement: PlacementArguments, device: torch.device, *, num_processes: int
) -> Any:
    """As `load_model`, with the adapter that `init_heads` were trained with, if any: the target they continue with."""
    model = load_model(model_args, placement, device, num_processes=num_processes)
    adapter = None if model_args.init_heads is None else find_adapter_of(model_args.init_heads)
    return model if adapter is None else load_adapter(model, adapter, merge=False)


def _name_the_rest(places: dict[str, Any], model_args: ModelArguments) -> dict[str, Any]:
    """The map with "", the place of what no other key names, written out: accelerate takes it for the whole model's."""
    config = AutoConfig.from_pretrained(model_args.target, trust_remote_code=model_args.trust_remote_code)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=model_args.trust_remote_code)
    named = {key: place for key, place in places.items() if key}
    written = dict(named)

    def place_rest(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = prefix + name
            if any(key.startswith(f"{path}.") for key in named):
                place_rest(child, f"{path}.")
            elif path not in named:
                written[path] = places[""]

    place_rest(skeleton, "")
    return written


def check_placement(target: Target, device: torch.device) -> None:
    """Raises ValueError when the token embedding, with which heads go, is not where they train."""
    if (target.device.type, target.device.index or 0) != (device.type, device.index or 0):
        raise ValueError(
            f"the device map keeps the target's token embedding on {target.device}, and the heads train on {device}: "
            "map it there, or train there (--use_cpu true for the CPU)"
        )
