"""Options of different packages that contradict one another: found before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import TrainingArguments

from draftsmith.training.data.streaming import check_streaming
from draftsmith.training.distributed.launch import check_launch, find_strategy
from draftsmith.training.options.run_options import RunOptions, parse_seconds


def check_options(options: RunOptions) -> None:
    """Refuses options that contradict one another, or do not fit the launch or the device.

    Raises:
        ValueError: naming every problem.
    """
    problems = [*_contradictions(options)]
    checks = (
        lambda: check_launch(options.training),
        lambda: check_muon(options.training.muon_learning_rate, options.training),
        lambda: check_streaming(options.data, options.training),
    )
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; and ".join(problems))


def check_muon(learning_rate: float | None, args: TrainingArguments) -> None:
    """Refuses Muon where it cannot train.

    Raises:
        ValueError: with a torch that has no Muon, and under DeepSpeed and FSDP.
    """
    if learning_rate is None:
        return
    instead = "leave it out (`--muon_learning_rate none` over a file that sets it), so that AdamW trains everything"
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"got muon_learning_rate {learning_rate}, which needs torch.optim.Muon, and torch {torch.__version__} has "
            f"none: install torch 2.9 or newer, or {instead}"
        )
    if find_strategy(args) != "ddp":
        raise ValueError(
            f"got muon_learning_rate {learning_rate} under DeepSpeed or FSDP, which split matrices that Muon needs "
            f"whole: {instead}, or train with plain DDP (configs/accelerate/multi_gpu.yaml)"
        )


def _contradictions(options: RunOptions) -> Iterator[str]:
    joint, training = options.joint, options.training
    if training.n_gpu > 1 and options.placement.target_device_map is None:  # a device map uses the other GPUs
        yield (
            f"one process sees {training.n_gpu} GPUs, and heads do not train under DataParallel: start with "
            "`accelerate launch --num_processes N`, or choose one GPU with CUDA_VISIBLE_DEVICES"
        )
    if options.run.time_budget is not None:
        yield from _budget_problems(options)
    if training.torch_compile:
        yield (
            "got torch_compile, which compiles the whole draft again for batches of other lengths, and so takes "
            "minutes for a step of seconds: leave it, torch_compile_backend and torch_compile_mode out"
        )
    schedule = getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type)
    if schedule in ("reduce_lr_on_plateau", "greedy"):
        yield f"got lr_scheduler_type {schedule}, which follows a metric: give one of the steps, such as cosine"
    if options.data.packing and getattr(training, "train_sampling_strategy", "random") == "group_by_length":
        yield (
            "got packing with train_sampling_strategy group_by_length, and packed rows are of one length: leave one of "
            "the two out"
        )
    if joint.is_on and options.features.features is not None:
        yield (
            f"got features {options.features.features} with lora_r {joint.lora_r}: stored features are stale after the "
            "first step of a target that is trained; leave one of the two out"
        )
    if options.features.features_endpoint is not None:
        elsewhere = {
            "lora_r": (joint.is_on, "trains the target"),
            "on_policy_fraction": (options.on_policy.is_on, "lets the target write replies"),
            "shard_target": (options.placement.shard_target != "none", "splits the target over the processes"),
            "eval_prompts": (options.data.eval_prompts, "lets the target decode"),
        }
        for name, (is_given, reason) in elsewhere.items():
            if is_given:
                yield f"got features_endpoint with {name}, which {reason}, and the target is elsewhere: leave one out"
    if joint.is_on and options.placement.shard_target != "none":
        yield (
            f"got shard_target {options.placement.shard_target} with lora_r {joint.lora_r}: a target that is trained "
            "stays whole on every process; leave one of the two out"
        )
    if options.on_policy.is_on:
        excluded = {
            "streaming": (options.data.streaming, "whose conversations have no numbers"),
            "packing": (options.data.packing, "which runs before training (group_by_length saves padding too)"),
            "features": (options.features.features, "which are stored only for the data's own texts"),
            "dataloader_persistent_workers": (training.dataloader_persistent_workers, "which keep the first replies"),
        }
        for name, (is_given, reason) in excluded.items():
            if is_given:
                yield f"got on_policy_fraction with {name}, {reason}: leave one out"


def _budget_problems(options: RunOptions) -> Iterator[str]:
    budget = options.run.time_budget or ""
    try:
        parse_seconds(budget)
    except ValueError as error:
        yield str(error)
    excluded = {
        "max_steps": (options.training.max_steps > 0, "which is the number of steps that the budget sets"),
        "streaming": (options.data.streaming, "whose length is not known"),
        "lora_r": (options.joint.is_on, "whose steps get slower when the adapters begin to learn"),
        "on_policy_fraction": (options.on_policy.is_on, "whose replies take time of their own"),
    }
    for name, (is_given, reason) in excluded.items():
        if is_given:
            yield f"got time_budget {budget} with {name}, {reason}: leave one out"


def refuse_with_images(options: RunOptions) -> None:
    """Refuses options that do not go together with conversations that have images.

    Raises:
        ValueError: naming every such option.
    """
    excluded = {
        "packing": (
            options.data.packing,
            "images belong to whole rows: --packing false, and group_by_length",
        ),
        "features": (options.features.features, "stored states are found by tokens, and images do not show in them"),
        "features_endpoint": (options.features.features_endpoint, "only text is sent to the server"),
        "on_policy_fraction": (options.on_policy.is_on, "the target would write replies without seeing"),
        "shard_target": (
            options.placement.shard_target != "none",
            "its processes share tokens only: target_device_map",
        ),
    }
    if problems := [f"leave {name} out ({reason})" for name, (is_given, reason) in excluded.items() if is_given]:
        raise ValueError(f"the conversations have images: {'; '.join(problems)}")
