"""How a run was launched, and whether it came out so: accelerate and DeepSpeed fall back silently, a run must not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import TrainingArguments

from training.features.sharded_target import import_deepspeed


def _is_asked_for(name: str, environ: Mapping[str, str] | None = None) -> bool:
    return (os.environ if environ is None else environ).get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true"


@dataclass(frozen=True)
class Launch:
    """What the launcher and the options ask for.

    Attributes:
        num_processes: of all machines together.
        strategy: "deepspeed", "fsdp", or "ddp" for everything else.
        is_alone: whether `accelerate launch` was told of several processes and started this one by itself, as it does
            for `distributed_type: MULTI_CPU` without MPI.
    """

    num_processes: int
    strategy: str
    is_alone: bool

    @classmethod
    def read(cls, args: TrainingArguments, environ: Mapping[str, str] | None = None) -> Launch:
        environ = os.environ if environ is None else environ
        strategy = "ddp"
        for name, option in (("deepspeed", args.deepspeed), ("fsdp", args.fsdp)):
            if option or _is_asked_for(name, environ):
                strategy = name
        is_told_of_others = "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_ADDR" in environ
        sizes = [environ[key] for key in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if key in environ]
        return cls(int(sizes[0]) if sizes else 1, strategy, is_told_of_others and not sizes)


def settle_devices(args: TrainingArguments) -> None:
    """Chooses CPUs and gloo for several processes without accelerators, before the process group is made.

    Without it accelerate would leave each process alone with all of the data, or the gradients apart.

    Raises:
        ValueError: use_cpu with FSDP or DeepSpeed, for which accelerate would silently take plain data parallelism.
    """
    has_accelerator = torch.accelerator.is_available()
    if not has_accelerator:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, where it is installed, warns
    launch = Launch.read(args)
    if launch.num_processes == 1:
        return
    is_cpu = args.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    if is_cpu and (launch.strategy == "deepspeed" or (launch.strategy == "fsdp" and has_accelerator)):
        raise ValueError(
            f"got use_cpu with {launch.strategy}, which accelerate silently turns into plain data parallelism: leave "
            "use_cpu out (`use_cpu: false` in the accelerate config); without GPUs, or with CUDA_VISIBLE_DEVICES='', "
            "the run is on CPUs all the same"
        )
    if has_accelerator and not is_cpu:
        return
    if args.ddp_backend is None:
        args.ddp_backend = "gloo"
    if launch.strategy == "deepspeed":
        import_deepspeed("cpu")
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"


def shard_with_fsdp(accelerator: Accelerator) -> bool:
    """Settles what accelerate leaves open when FSDP was asked for; returns whether heads train under it.

    accelerate knows FSDP on accelerators alone and ignores it on CPUs, where torch has it too (gloo). Its mixed
    precision would make weights, gradients and losses bfloat16; heads keep float32 and compute under autocast, as they
    do everywhere else.

    Raises:
        ValueError: FSDP1, which keeps flat parameters that heads cannot be read from.
    """
    state: Any = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU and _is_asked_for("fsdp"):
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if state.distributed_type != DistributedType.FSDP:
        if _is_asked_for("fsdp"):
            raise ValueError(
                f"FSDP was asked for, and accelerate set up {state.distributed_type} with {state.num_processes} "
                "processes: start several with configs/accelerate/fsdp2.yaml, or leave FSDP out"
            )
        return False
    if state.fsdp_plugin.fsdp_version != 2:
        raise ValueError("FSDP1 was asked for: write `fsdp_version: 2`, as in configs/accelerate/fsdp2.yaml")
    state.fsdp_plugin.mixed_precision_policy = None
    return True


def autocast_in_deepspeed(accelerator: Accelerator) -> None:
    """Makes bf16 under DeepSpeed what it is everywhere else: autocast around weights, gradients and moments in float32.

    DeepSpeed's own `bf16` would train and save bfloat16 weights, besides a float32 copy of them in the optimizer.

    Raises:
        ValueError: for what a DeepSpeed file says of its `bf16` besides `enabled`.
    """
    plugin: Any = accelerator.state.deepspeed_plugin
    config = plugin.hf_ds_config.config
    bf16 = config.get("bf16", {})
    if bf16.get("enabled") is not True:
        return
    if more := bf16.keys() - {"enabled"}:
        raise ValueError(
            f"the DeepSpeed file sets {', '.join(sorted(more))} in `bf16`, which heads train without (bf16 is autocast "
            "around float32 weights): leave it out"
        )
    del config["bf16"]
    # No modules whose gradients may be summed, and weights gathered, in bfloat16: DDP and FSDP use float32 for both.
    config["torch_autocast"] = {"dtype": "bfloat16", "lower_precision_safe_modules": [], "enabled": True}
    plugin.hf_ds_config._dtype = torch.float32  # to which transformers casts inputs


def autocast(accelerator: Accelerator, args: TrainingArguments) -> AbstractContextManager[Any]:
    """As the options ask for it; accelerate has none under DeepSpeed."""
    return torch.autocast(args.device.type, torch.bfloat16) if args.bf16 else accelerator.autocast()


def check_launch(args: TrainingArguments) -> None:
    """Refuses a run that is not what was launched.

    Raises:
        ValueError: saying what was asked for, what came of it, and what to change.
    """
    launch = Launch.read(args)
    state = args.distributed_state
    if launch.is_alone:
        raise ValueError(
            f"accelerate was told of several processes (MASTER_ADDR is {os.environ['MASTER_ADDR']}) and started one: "
            "`distributed_type: MULTI_CPU` needs MPI; use configs/accelerate/multi_gpu.yaml, which runs on CPUs as "
            "well (for one process alone: unset MASTER_ADDR)"
        )
    if state.num_processes != launch.num_processes:
        # transformers gives DeepSpeed no backend where accelerate does not.
        cure = (
            f"start with `accelerate launch --config_file configs/accelerate/deepspeed_zero2.yaml` instead of "
            f"--deepspeed {args.deepspeed} (which such a file may name as its deepspeed_config_file)"
            if args.deepspeed
            else "give --ddp_backend gloo on CPUs, nccl on GPUs"
        )
        raise ValueError(
            f"the launcher started {launch.num_processes} processes, and this one sees {state.num_processes} "
            f"(backend {state.backend!r}), so each would train alone on all of the data: {cure}"
        )
    wanted = {"deepspeed": DistributedType.DEEPSPEED}.get(launch.strategy)
    is_apart = state.num_processes > 1 and state.distributed_type == DistributedType.NO
    if is_apart or (wanted is not None and state.distributed_type != wanted):
        raise ValueError(
            f"{launch.strategy} was asked for, and accelerate set up {state.distributed_type} with "
            f"{state.num_processes} processes: start with accelerate launch and a file of configs/accelerate"
        )


def describe_launch(accelerator: Accelerator) -> dict[str, Any]:
    """What became of a launch, for the record: distributed_type, num_processes and DeepSpeed's zero_stage."""
    state: Any = accelerator.state
    described = {"distributed_type": state.distributed_type.value, "num_processes": state.num_processes}
    if state.distributed_type == DistributedType.DEEPSPEED:
        described["zero_stage"] = state.deepspeed_plugin.zero_stage
    return described
