"""All options of a run in one object, the options of the run as a whole, and what contradicts one another: found before
anything is loaded."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

from draftsmith.training.data.options import DataArguments, find_given, option
from draftsmith.training.distributed.launch import check_launch
from draftsmith.training.features.target_options import FeatureArguments, ModelArguments, PlacementArguments
from draftsmith.training.options.training_options import HeadsTrainingArguments, JointArguments, check_muon

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str) -> float:
    """Seconds of a time such as 90m, 2h or 1.5d.

    >>> [parse_seconds(text) for text in ("90m", "2h", "1.5d", "45s")]
    [5400.0, 7200.0, 129600.0, 45.0]

    Raises:
        ValueError: another form, or no time at all.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or not float(found[1]):
        raise ValueError(f"got time_budget {text!r}: give a number and s, m, h or d, such as 90m or 2h")
    return float(found[1]) * _UNITS[found[2]]


@dataclass
class RunArguments:
    """The run as a whole."""

    choose: bool | None = option(
        default=None,
        help="Choose every option that is not given, from the target's shape and the device's memory, and print the "
        "reasons; none = for new heads, unless a --config names their kind.",
    )
    time_budget: str | None = option(
        default=None,
        help="Train for at most this long, such as 90m, 2h or 1d: a measurement of the speed sets the number of steps. "
        "none = as long as the steps or epochs take.",
    )
    report: bool = option(default=True, help="Write report.html at the end: curves, acceptance by depth, examples.")


@dataclass(frozen=True)
class RunOptions:
    """Every option of a run, as `parse_arguments` gives them: one field is one package's options."""

    model: ModelArguments
    data: DataArguments
    training: HeadsTrainingArguments
    joint: JointArguments
    run: RunArguments
    placement: PlacementArguments
    features: FeatureArguments


ARGUMENT_CLASSES: tuple[Any, ...] = tuple(get_type_hints(RunOptions).values())


# Options that contradict each other, and why.
_EXCLUDED = (
    ("features", "features_endpoint", "one gives the states (draftsmith features --endpoint stores a server's states)"),
    ("features", "lora_r", "stored features are stale after the first step of a target that is trained"),
    ("features_endpoint", "lora_r", "lora_r trains the target, which is elsewhere"),
    ("features_endpoint", "shard_target", "shard_target splits the target, which is elsewhere, over the processes"),
    ("features_endpoint", "eval_prompts", "eval_prompts lets the target decode, which is elsewhere"),
    ("loss_vocabulary", "lora_r", "the loss copies rows of the LM head of a target that is trained"),
    ("loss_vocabulary", "shard_target", "the loss copies rows of the LM head of a target that is split"),
    ("shard_target", "lora_r", "a target that is trained stays whole on every process"),
    ("streaming", "train_sampling_strategy", "a stream is read in its own order (see --shuffle_buffer)"),
    ("time_budget", "max_steps", "the budget sets the number of steps"),
    ("time_budget", "streaming", "the length of a stream is not known"),
    ("time_budget", "lora_r", "the steps of a target that is trained are not measured"),
)


def check_options(options: RunOptions) -> None:
    """Refuses options that contradict one another, or do not fit the launch or the device.

    Raises:
        ValueError: naming every problem.
    """
    problems = [*_contradictions(options)]
    checks = (
        lambda: check_launch(options.training),
        lambda: check_muon(options.training),
        lambda: None if options.run.time_budget is None else parse_seconds(options.run.time_budget),
    )
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; and ".join(problems))


def _contradictions(options: RunOptions) -> Iterator[str]:
    training = options.training
    if training.n_gpu > 1 and options.placement.target_device_map is None:  # a device map uses the other GPUs
        yield (
            f"one process sees {training.n_gpu} GPUs, and heads do not train under DataParallel: start with "
            "`accelerate launch --num_processes N`, or choose one GPU with CUDA_VISIBLE_DEVICES"
        )
    if training.torch_compile:
        yield (
            "got torch_compile, which compiles the whole draft again for batches of other lengths, and so takes "
            "minutes for a step of seconds: leave it, torch_compile_backend and torch_compile_mode out"
        )
    schedule = getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type)
    if schedule in ("reduce_lr_on_plateau", "greedy"):
        yield f"got lr_scheduler_type {schedule}, which follows a metric: give one of the steps, such as cosine"
    if options.data.streaming and training.max_steps <= 0:
        yield "got streaming without max_steps: a stream never ends, so give the number of training steps"
    given = _find_given(options)
    for one, other, reason in _EXCLUDED:
        if one in given and other in given:
            yield f"got {one} {given[one]} with {other} {given[other]}: {reason}; leave one of the two out"


def _find_given(options: RunOptions) -> dict[str, Any]:
    """Name -> value of every option that differs from its default."""
    return {name: getattr(part, name) for part in vars(options).values() for name in find_given(part)}


def refuse_with_images(options: RunOptions) -> None:
    """Refuses options that do not go together with conversations that have images.

    Raises:
        ValueError: naming every such option.
    """
    excluded = {
        "packing": "images belong to whole rows: --packing false, and group_by_length",
        "features": "stored states are found by tokens, and images do not show in them",
        "features_endpoint": "only text is sent to the server",
        "shard_target": "its processes share tokens only: target_device_map",
    }
    given = _find_given(options)
    if problems := [f"leave {name} out ({reason})" for name, reason in excluded.items() if name in given]:
        raise ValueError(f"the conversations have images: {'; '.join(problems)}")
