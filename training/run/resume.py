"""Finds the checkpoint that a run resumes, and checks that the resumed run is the interrupted one.

A resumed run equals the uninterrupted one, weight for weight and metric for metric, only if data, options and number of
processes are the same. `describe_run` collects them, every checkpoint stores them, `check_same_run` compares.
"""

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import datasets
from transformers import TrainerState

from draftsmith.training.data.set_statistics import row_lengths
from draftsmith.training.options.command_line import default_of
from draftsmith.training.run.checkpoints import RUN_FILE, read_run_file

logger = logging.getLogger(__name__)

# A run cannot be resumed without these files; in the order in which they are written.
_NEEDED = ("config.json", "model.safetensors", "trainer_state.json", RUN_FILE)
# Options that change neither the weights nor the order of the data: measuring, saving, logging, uploading, loading
# speed, placement of the target, storage of features.
_FREE = re.compile(
    r"(logging_|save_|eval_|num_eval_|max_eval_|per_device_eval_|hub_|push_to_hub|report|project|trackio|log_level"
    r"|disable_tqdm|output_dir|run_name|early_stopping|load_best_model|resume_"
    r"|restore_callback|include_num_input|num_proc|dataloader_(?!drop_last)|ddp_timeout|torch_empty_cache|skip_memory_"
    r"|trust_remote_code|feature_|features_endpoint|endpoint_model|concurrency|shared_folder|target_device_map"
    r"|shard_target).*"
)
# Names of the data; not compared where its size is.
_OF_DATA = re.compile(r"dataset.*|max_samples|skip_bad_lines")
_OF_HEADS = {"head_type", "head_overrides", "lora_r"}


def find_checkpoint(output_dir: str, wanted: Any, *, is_main_process: bool = True) -> Path | None:
    """The checkpoint for `--resume_from_checkpoint WANTED`; None = start from the beginning.

    Args:
        wanted: None or false; true = the newest complete checkpoint in `output_dir`; else a folder.

    Raises:
        ValueError: the given folder is missing or incomplete.
    """
    if wanted is None or str(wanted).lower() in ("false", ""):
        if is_main_process and (folders := sorted(Path(output_dir).glob("checkpoint-*"), key=_step)):
            logger.warning(
                "%s has checkpoints of an earlier run, up to %s, which this run's own will replace. Until then "
                "--resume_from_checkpoint true continues that run. To keep them, train in another output_dir",
                output_dir,
                folders[-1].name,
            )
        return None
    if str(wanted).lower() != "true":
        folder = Path(wanted)
        if damage := find_damage(folder):
            raise ValueError(
                f"cannot resume from {folder}: {damage}; give a complete checkpoint, or true for the newest one"
            )
        return folder
    newest = find_newest(Path(output_dir), warns=is_main_process)
    if newest is None and is_main_process:
        logger.warning("no complete checkpoint in %s: starting from the beginning", output_dir)
    return newest


def find_newest(output_dir: Path, *, warns: bool = False, most: float = math.inf) -> Path | None:
    """The newest complete checkpoint of at most `most` steps; with `warns`, damaged checkpoints that are newer are
    logged."""
    folders = [folder for folder in output_dir.glob("checkpoint-*") if _step(folder) <= most]
    for folder in sorted(folders, key=_step, reverse=True):
        damage = find_damage(folder)
        if damage is None:
            return folder
        if warns:
            logger.warning("%s is skipped: %s", folder, damage)
    return None


def find_damage(folder: Path) -> str | None:
    """The file that a checkpoint lacks, or None if it is complete.

    A run's own checkpoints are complete when they have their names (`draftsmith.training.run.checkpoints`).
    """
    for name in _NEEDED:
        if not (folder / name).is_file():
            return f"{name} is missing"
    # FSDP writes optimizer.bin or the folder optimizer_0; DeepSpeed writes the folder global_stepN.
    if not any(folder.glob("optimizer*")) and not any(folder.glob("global_step*")):
        return "optimizer.pt is missing (with save_only_model there is nothing to resume from)"
    return None


def describe_run(settings: dict[str, Any], train_set: Any, num_processes: int) -> dict[str, Any]:
    """The properties that two runs must share to be the same run, as JSON values.

    Args:
        settings: every option, from `draftsmith.training.options.command_line.resolve_arguments`.
        train_set: the tokenized conversations, or a stream, of which only the names are compared.
    """
    is_stream = not isinstance(train_set, datasets.Dataset)
    data = None if is_stream else f"{len(train_set):,} rows of {sum(row_lengths(train_set)):,} tokens"
    options = {
        key: value
        for key, value in settings.items()
        if not (_FREE.fullmatch(key) or (not is_stream and _OF_DATA.fullmatch(key)))
    }
    if is_stream:  # its rows and their order depend on these as well
        options["dataloader_num_workers"] = settings.get("dataloader_num_workers")
        options["eval_dataset"] = bool(settings.get("eval_dataset"))
    described = {"num_processes": num_processes, "training data": data, "options": options}
    found: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return found


def check_same_run(folder: Path, now: dict[str, Any], *, may_differ: bool) -> None:
    """Refuses to resume a checkpoint with other data, options or processes; with `may_differ` it only warns.

    Heads keep their configuration, so another one is refused either way.

    Raises:
        ValueError: naming the difference and both values.
    """
    stored = read_run_file(folder)
    one, other = ({**run, **run["options"]} for run in (stored, now))
    different = {}
    for key in sorted((one.keys() | other.keys()) - {"options", "seconds"}):
        before, after = (run.get(key, default_of(key)) for run in (one, other))
        if before != after:
            different[key] = f"{key} {before!r} (now {after!r})"
    if not different:
        return
    words = ", ".join(different.values())
    if not may_differ or _OF_HEADS & different.keys():
        raise ValueError(
            f"{folder} was trained with {words}: the resumed run would not equal the interrupted one. Resume with the "
            "same data and options; or give --resume_with_changes true (the heads must be the same); or start a new "
            f"run from its weights with --init_heads {folder}"
        )
    logger.warning("%s was trained with %s: this is no exact resume", folder, words)


def is_finished(state: TrainerState, args: Any) -> bool:
    """Whether the run's last step was made before this checkpoint."""
    callbacks: Any = state.stateful_callbacks or {}
    stopped = callbacks.get("EarlyStoppingCallback", {}).get("attributes", {})
    patience = args.early_stopping_patience
    if patience is not None and stopped.get("early_stopping_patience_counter", 0) >= patience:
        return True
    if args.max_steps > 0:
        return bool(state.global_step >= args.max_steps)
    return state.epoch is not None and bool(state.epoch >= args.num_train_epochs)


def _step(folder: Path) -> int:
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else -1
