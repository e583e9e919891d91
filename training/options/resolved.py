"""Options back to YAML: `training_config.yaml`, from which `--config` starts the same run again."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import TrainingArguments

from training.options.command_line import default_of, known_keys, optional_keys
from training.options.run_options import ARGUMENT_CLASSES, RunOptions
from training.options.training_options import HeadsTrainingArguments

# Decided by the machine, or about how the run was started: another start of the same run may differ.
_LEFT_OUT = {"dataloader_pin_memory", "ddp_backend", "local_rank", "resume_from_checkpoint", "dry_run"}


class _StockArguments(TrainingArguments):
    """transformers' defaults, to compare with. Sets up no device, which would reset accelerate's state."""

    _n_gpu = 0

    @property
    def _setup_devices(self) -> torch.device:
        return torch.device("cpu")


def resolve_arguments(*parts: Any) -> dict[str, Any]:
    """Returns the options as one flat mapping that, written as YAML, `--config` reads back to the same run.

    Of `TrainingArguments` the mapping holds our own fields and those that differ from transformers' defaults. Secrets
    are left out.

    Args:
        parts: objects of `ARGUMENT_CLASSES`.
    """
    options = RunOptions.collect(parts)
    settings: dict[str, Any] = {}
    for part in options.parts():
        if part is not options.training:
            settings |= dataclasses.asdict(part)
    settings |= {"head_overrides": options.model.parse_head_overrides(), **_resolve_training(options.training)}
    left_out = _LEFT_OUT | {key for key in known_keys() if key.endswith("_token")}
    # Where None differs from the default it says something, and is written as null.
    unset = {key for key in optional_keys(ARGUMENT_CLASSES) if default_of(key) is not None}
    return {
        key: value
        for key, value in settings.items()
        if key not in left_out and (value not in (None, [], {}) or (value is None and key in unset))
    }


def _resolve_training(training: HeadsTrainingArguments) -> dict[str, Any]:
    stock = _StockArguments(output_dir=training.output_dir).to_dict()
    ours = set(HeadsTrainingArguments.__annotations__)
    known = known_keys()
    settings = {
        key: value
        for key, value in training.to_dict().items()
        if key in known and (key in ours or value != stock.get(key))
    }
    settings["report_to"] = settings["report_to"] or ["none"]
    metric = training.metric_for_best_model
    if metric is not None and settings.get("greater_is_better") == (not metric.endswith("loss")):
        settings.pop("greater_is_better", None)  # follows from this metric, and would be wrong for another one
    return settings
