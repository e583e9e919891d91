"""How a run was launched. accelerate falls back to plain training silently; a run must not."""

import os
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import TrainingArguments


def is_requested(name: str) -> bool:
    """Whether the launcher was asked for fsdp or deepspeed."""
    return os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true"


def find_strategy(args: TrainingArguments) -> str:
    """The strategy that the launcher or the options request: deepspeed, fsdp, or ddp for everything else."""
    for name, option in (("fsdp", args.fsdp), ("deepspeed", args.deepspeed)):
        if option or is_requested(name):
            return name
    return "ddp"


_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def count_launched() -> int:
    """The number of processes that the launcher started, on all machines together."""
    return int(next((os.environ[key] for key in _SIZES if key in os.environ), 1))


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


def settle_devices(args: TrainingArguments) -> None:
    """Chooses CPUs and gloo for several processes without accelerators, before the process group is made.

    Otherwise accelerate would let each process train on all of the data by itself.
    """
    has_accelerator = torch.accelerator.is_available()
    if not has_accelerator:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, where it is installed, warns without it
    is_cpu = args.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    if count_launched() == 1 or (has_accelerator and not is_cpu):
        return
    if args.ddp_backend is None:
        args.ddp_backend = "gloo"
    if find_strategy(args) == "deepspeed":
        import_deepspeed("cpu")
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"


def check_launch(args: TrainingArguments) -> None:
    """Refuses a run whose processes are not the ones that were launched.

    Raises:
        ValueError: with the request, the result and the cure.
    """
    state, strategy = args.distributed_state, find_strategy(args)
    # Without MPI, accelerate's MULTI_CPU starts one process per machine, with an address but without a number.
    is_on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    if is_on_cpu and "MASTER_ADDR" in os.environ and not any(key in os.environ for key in _SIZES):
        raise ValueError(
            "accelerate was asked for several processes on CPUs (MASTER_ADDR is set) and started this one without the "
            "others, which needs MPI: use configs/accelerate/multi_gpu.yaml, which runs on CPUs too; for one process "
            "use configs/accelerate/cpu.yaml and unset MASTER_ADDR"
        )
    if state.num_processes != count_launched():
        raise ValueError(
            f"the launcher started {count_launched()} processes, and this one sees {state.num_processes} (backend "
            f"{state.backend!r}): each would train on all of the data by itself; start with accelerate launch and a "
            "file of configs/accelerate, or give --ddp_backend gloo on CPUs, nccl on GPUs"
        )
    is_wrong = strategy == "deepspeed" and state.distributed_type != DistributedType.DEEPSPEED
    if is_wrong or (state.num_processes > 1 and state.distributed_type == DistributedType.NO):
        raise ValueError(
            f"{strategy} was requested, and accelerate set up {state.distributed_type} with {state.num_processes} "
            "processes: start with accelerate launch and a file of configs/accelerate, and leave use_cpu out (without "
            "GPUs the run is on CPUs anyway)"
        )


def shard_with_fsdp(accelerator: Accelerator) -> bool:
    """Completes accelerate's FSDP set-up; returns whether heads train under FSDP.

    accelerate ignores FSDP on CPUs, where torch supports it with gloo. accelerate's mixed precision would turn weights,
    gradients and losses into bfloat16; heads keep float32 and compute under autocast.

    Raises:
        ValueError: FSDP1, whose flat parameters hide the heads' weights; FSDP that accelerate did not set up.
    """
    state: Any = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU and is_requested("fsdp"):
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if state.distributed_type != DistributedType.FSDP:
        if is_requested("fsdp"):
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
