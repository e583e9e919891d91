"""What options of different parts of a run say against one another: found before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from training.data.options import DataArguments
from training.data.streaming import check_streaming
from training.features.options import FeatureArguments
from training.features.target_options import PlacementArguments
from training.options.arguments import HeadsTrainingArguments
from training.reporting.reporters import check_reporters
from training.run.joint import JointArguments
from training.run.launching import check_launch
from training.run.optimizer import check_muon


def check_options(
    data_args: DataArguments,
    training_args: HeadsTrainingArguments,
    joint_args: JointArguments,
    placement: PlacementArguments,
    feature_args: FeatureArguments,
) -> None:
    """Refuses options that do not go together, that what is installed cannot do, and launches that came out otherwise.

    Raises:
        ValueError: naming all that is wrong.
    """
    problems = [*_contradictions(data_args, training_args, joint_args, placement, feature_args)]
    for check in (
        partial(check_launch, training_args),
        partial(check_muon, training_args.muon_learning_rate, training_args),
        partial(check_streaming, data_args, training_args),
        partial(check_reporters, training_args.report_to),
    ):
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; and ".join(problems))


def _contradictions(
    data_args: DataArguments,
    training_args: HeadsTrainingArguments,
    joint_args: JointArguments,
    placement: PlacementArguments,
    feature_args: FeatureArguments,
) -> Iterator[str]:
    if training_args.n_gpu > 1 and placement.target_device_map is None:  # which has the others for the target
        yield (
            f"one process sees {training_args.n_gpu} GPUs, and heads do not train under DataParallel: start with "
            "`accelerate launch --num_processes N`, or choose one GPU with CUDA_VISIBLE_DEVICES"
        )
    if joint_args.is_on and feature_args.features is not None:
        yield (
            f"got features {feature_args.features} with lora_r {joint_args.lora_r}: a target that is trained "
            "gives other states at every step; leave one of the two out"
        )
    if joint_args.is_on and placement.shard_target != "none":
        yield (
            f"got shard_target {placement.shard_target} with lora_r {joint_args.lora_r}: a target that is trained too "
            "stays whole on every process; leave one of the two out"
        )
    if data_args.packing and training_args.train_sampling_strategy == "group_by_length":
        yield (
            "got packing and train_sampling_strategy group_by_length: packed rows are of one length, and their "
            "documents are grouped within each batch; leave one of the two out"
        )
