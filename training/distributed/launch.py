"""How a run was launched. accelerate falls back to plain training silently; a run must not."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import TrainingArguments

from training.features.sharded_target import import_deepspeed


def _is_requested(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true"


@dataclass(frozen=True)
class Launch:
    """The launcher's and the options' request.

    Attributes:
        num_processes: of all machines together.
        strategy: "deepspeed", "fsdp", or "ddp" for everything else.
        is_alone: `accelerate launch` was told of several processes and started one, as `MULTI_CPU` without MPI does.
    """

    num_processes: int
    strategy: str
    is_alone: bool = False

    @classmethod
    def read(cls, args: TrainingArguments) -> Launch:
        strategy = "ddp"
        for name, option in (("deepspeed", args.deepspeed), ("fsdp", args.fsdp)):
            if option or _is_requested(name):
                strategy = name
        sizes = [os.environ[key] for key in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if key in os.environ]
        is_told_of_others = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
        return cls(int(sizes[0]) if sizes else 1, strategy, is_told_of_others and not sizes)


def settle_devices(args: TrainingArguments) -> None:
    """Chooses CPUs and gloo for several processes without accelerators, before the process group is made.

    Otherwise accelerate would let each process train on all of the data by itself.
    """
    has_accelerator = torch.accelerator.is_available()
    if not has_accelerator:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, where it is installed, warns without it
    launch = Launch.read(args)
    is_cpu = args.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    if launch.num_processes == 1 or (has_accelerator and not is_cpu):
        return
    if args.ddp_backend is None:
        args.ddp_backend = "gloo"
    if launch.strategy == "deepspeed":
        import_deepspeed("cpu")
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"


def check_launch(args: TrainingArguments) -> None:
    """Refuses a run whose processes are not the ones that were launched.

    Raises:
        ValueError: with the request, the result and the cure.
    """
    launch = Launch.read(args)
    state = args.distributed_state
    if launch.is_alone:
        raise ValueError(
            f"accelerate was told of several processes (MASTER_ADDR is {os.environ['MASTER_ADDR']}) and started one: "
            "`distributed_type: MULTI_CPU` needs MPI. Use configs/accelerate/multi_gpu.yaml, which runs on CPUs too "
            "(for a single process: unset MASTER_ADDR)"
        )
    if state.num_processes != launch.num_processes:
        # transformers gives DeepSpeed no backend where accelerate does not.
        cure = (
            f"start with `accelerate launch --config_file configs/accelerate/deepspeed_zero2.yaml` instead of "
            f"--deepspeed {args.deepspeed} (name that file as deepspeed_config_file there)"
            if args.deepspeed
            else "give --ddp_backend gloo on CPUs, nccl on GPUs"
        )
        raise ValueError(
            f"the launcher started {launch.num_processes} processes, and this one sees {state.num_processes} "
            f"(backend {state.backend!r}): each would train on all of the data by itself; {cure}"
        )
    is_wrong = launch.strategy == "deepspeed" and state.distributed_type != DistributedType.DEEPSPEED
    if is_wrong or (state.num_processes > 1 and state.distributed_type == DistributedType.NO):
        raise ValueError(
            f"{launch.strategy} was requested, and accelerate set up {state.distributed_type} with "
            f"{state.num_processes} processes: start with accelerate launch and a file of configs/accelerate, and "
            "leave use_cpu out (without GPUs the run is on CPUs anyway)"
        )


def shard_with_fsdp(accelerator: Accelerator) -> bool:
    """Completes accelerate's FSDP set-up; returns whether heads train under FSDP.

    accelerate ignores FSDP on CPUs, where torch supports it with gloo. accelerate's mixed precision would turn weights,
    gradients and losses into bfloat16; heads keep float32 and compute under autocast.

    Raises:
        ValueError: FSDP1, whose flat parameters hide the heads' weights; FSDP that accelerate did not set up.
    """
    state: Any = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU and _is_requested("fsdp"):
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if state.distributed_type != DistributedType.FSDP:
        if _is_requested("fsdp"):
            raise ValueError(
                f"FSDP was requested, and accelerate set up {state.distributed_type} with {state.num_processes} "
                "processes: start several with configs/accelerate/fsdp2.yaml, or leave FSDP out"
            )
        return False
    if state.fsdp_plugin.fsdp_version != 2:
        raise ValueError("FSDP1 was requested: write `fsdp_version: 2`, as in configs/accelerate/fsdp2.yaml")
    state.fsdp_plugin.mixed_precision_policy = None
    return True


def autocast_in_deepspeed(accelerator: Accelerator) -> None:
    """Makes bf16 under DeepSpeed mean autocast, with weights, gradients and moments in float32, as everywhere else.

    DeepSpeed's own `bf16` would train and save bfloat16 weights.

    Raises:
        ValueError: a DeepSpeed file with more in `bf16` than `enabled`.
    """
    plugin: Any = accelerator.state.deepspeed_plugin
    config = plugin.hf_ds_config.config
    bf16 = config.get("bf16", {})
    if bf16.get("enabled") is not True:
        return
    if more := bf16.keys() - {"enabled"}:
        raise ValueError(
            f"the DeepSpeed file sets {', '.join(sorted(more))} in `bf16`: heads train with autocast around float32 "
            "weights, so leave it out"
        )
    del config["bf16"]
    # No modules may sum gradients or gather weights in bfloat16: DDP and FSDP use float32 for both.
    config["torch_autocast"] = {"dtype": "bfloat16", "lower_precision_safe_modules": [], "enabled": True}
    plugin.hf_ds_config._dtype = torch.float32  # transformers casts inputs to this dtype


def autocast(accelerator: Accelerator, args: TrainingArguments) -> AbstractContextManager[Any]:
    """The options' autocast; accelerate has none under DeepSpeed."""
    return torch.autocast(args.device.type, torch.bfloat16) if args.bf16 else accelerator.autocast()


def describe_launch(accelerator: Accelerator) -> dict[str, Any]:
    """The processes, for the record: distributed_type, num_processes and DeepSpeed's zero_stage."""
    state: Any = accelerator.state
    described = {"distributed_type": state.distributed_type.value, "num_processes": state.num_processes}
    if state.distributed_type == DistributedType.DEEPSPEED:
        described["zero_stage"] = state.deepspeed_plugin.zero_stage
    return described
