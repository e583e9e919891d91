"""One training run: target, heads, data, trainer; then the finished heads and a record of how they came to be."""

from __future__ import annotations

import json
import logging
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import nn
from transformers import AutoTokenizer, EarlyStoppingCallback, TrainerState, set_seed

from heads import HEAD_TYPES, DraftHeads, create_heads
from heads.adapter import FOLDER
from inference import Target
from inference.targets.model_config import find_length_limit
from training.data.collation import ConversationCollator, count_tokens
from training.data.options import DataArguments, seed_of_data
from training.data.packing import pack_rows
from training.data.streaming import ConversationStream
from training.data.training_sets import cut_to_limit, load_datasets
from training.features.options import FeatureArguments
from training.features.preparation import prepare_features
from training.features.self_check import check_first_row
from training.features.sharded_target import count_held
from training.features.store_checks import RowsOfRun
from training.features.target_identity import hash_tokenizer, identify_target
from training.features.target_loading import check_placement, load_model, loading_whole
from training.features.target_options import ModelArguments, PlacementArguments
from training.losses.depth_weights import parse_depth_weights
from training.options.arguments import HeadsTrainingArguments
from training.options.checks import check_options
from training.options.command_line import resolve_arguments
from training.options.run_arguments import RunArguments, pick
from training.reporting.run_report import report_run
from training.run.checkpoints import read_run_file, write_file
from training.run.evaluation import acceptance_meter, eval_prompts
from training.run.joint import JointArguments, JointModel, adapt_target
from training.run.joint_trainer import JointTrainer
from training.run.launching import describe_launch
from training.run.resume import check_same_heads, check_same_run, describe_run, find_checkpoint, is_finished
from training.run.stopping import explain_full_disk
from training.run.trainer import HeadsTrainer
from training.synthesis.on_policy import OnPolicyArguments, OnPolicyRows, WriteReplies, check_on_policy

logger = logging.getLogger(__name__)


def run_training(
    model_args: ModelArguments, data_args: DataArguments, training_args: HeadsTrainingArguments, *more: Any
) -> dict[str, float]:
    """Trains heads as the arguments say, saves them in `output_dir` and returns the final metrics.

    With `--resume_from_checkpoint true` (or a folder) an interrupted run goes on from its newest complete checkpoint.
    """
    return prepare_run(model_args, data_args, training_args, *more).finish()


@dataclass(frozen=True)
class PreparedRun:
    """A run with everything loaded and checked, before its first step.

    stored_bytes: of features that it will add to its folder of them.
    """

    trainer: HeadsTrainer
    output_dir: Path
    checkpoint: Path | None
    tokenizer: Any
    settings: dict[str, Any]
    wants_report: bool = True
    stored_bytes: int = 0

    def finish(self) -> dict[str, float]:
        """Trains, saves the heads and the record, and returns the final metrics."""
        trainer = self.trainer
        seconds = _train(trainer, self.checkpoint)
        if trainer.eval_dataset is not None:
            metrics = _final_metrics(trainer)
        else:
            cast(nn.Module, trainer.model).eval()  # adapters may have dropout
            metrics = {f"eval_{name}": value for name, value in (trainer.measure_acceptance or dict)().items()}
        with explain_full_disk(trainer, "the trained heads"):
            trainer.save_model(str(self.output_dir), _internal_call=True)  # uploaded when all files are there
        distributed = {
            **describe_launch(trainer.accelerator),
            "target_parameters_per_process": count_held(trainer.target.model),
        }
        record = _make_record(metrics, trainer.state, seconds, distributed)
        if trainer.args.process_index == 0:
            (self.output_dir / "training_args.bin").unlink(missing_ok=True)  # a pickle of those in training_config.yaml
            _write_text(trainer, "training_record.json", json.dumps(record, indent=2) + "\n")
        report_run(trainer, self.tokenizer, self.settings, record, wants_report=self.wants_report)
        if trainer.args.push_to_hub:
            trainer.push_to_hub()
        return metrics


def prepare_run(
    model_args: ModelArguments, data_args: DataArguments, training_args: HeadsTrainingArguments, *more: Any
) -> PreparedRun:
    """Loads and checks what a run needs, and writes its configuration.

    Args:
        more: further objects of `training.options.command_line.ARGUMENT_CLASSES`; what is left out has its defaults.

    Raises:
        ValueError, OSError: for options, files and folders that are wrong.
    """
    joint_args, placement = pick(more, JointArguments), pick(more, PlacementArguments)
    feature_args, on_policy_args = pick(more, FeatureArguments), pick(more, OnPolicyArguments)
    if placement.target_device_map is not None and training_args.n_gpu > 1:
        training_args._n_gpu = 1
    check_options(data_args, training_args, joint_args, placement, feature_args)
    set_seed(training_args.seed)  # Trainer does so too, but after the heads have drawn their first weights
    data_seed = seed_of_data(training_args)
    is_main_process, is_dry = training_args.process_index == 0, pick(more, RunArguments).dry_run
    checkpoint = find_checkpoint(
        training_args.output_dir, training_args.resume_from_checkpoint, is_main_process=is_main_process
    )
    stored_heads = _load_stored_heads(model_args, checkpoint)
    model = load_model(model_args, placement, training_args.device, num_processes=training_args.world_size)
    target = Target(adapt_target(model, stored_heads, joint_args))
    check_placement(target, training_args.device)
    tokenizer = AutoTokenizer.from_pretrained(model_args.target, trust_remote_code=model_args.trust_remote_code)
    heads = _make_heads(model_args, target, stored_heads, checkpoint, joint_args)

    limit = find_length_limit(target.text_config)
    data_args = cut_to_limit(data_args, limit, has_warning=is_main_process)
    with training_args.main_process_first(desc="tokenizing conversations"):
        train_set, eval_set = load_datasets(
            data_args,
            tokenizer,
            seed=data_seed,
            rank=training_args.process_index,
            num_processes=training_args.world_size,
        )
    if heads.wants_token_counts:
        is_stream = isinstance(train_set, ConversationStream)
        counted = train_set.first_rows(data_args.vocabulary_rows) if is_stream else train_set
        heads.fit_vocabulary(count_tokens(counted, target.vocab_size))

    settings = resolve_arguments(model_args, data_args, training_args, *more)
    prompts = eval_prompts(data_args, eval_set, tokenizer, limit)
    description = describe_run(settings, train_set, training_args.world_size, eval_set=eval_set, prompts=prompts)
    if checkpoint is not None:
        check_same_run(checkpoint, description, may_differ=training_args.resume_with_changes)
    measure_acceptance = acceptance_meter(target, heads, prompts, data_args.eval_max_new_tokens)
    features = prepare_features(
        feature_args,
        target=target,
        heads=heads,
        rows=RowsOfRun(train_set, eval_set, data_args.dataset, data_args.max_length, hash_tokenizer(tokenizer)),
        loss_type=training_args.loss_type or heads.default_loss,
        collate=ConversationCollator(pad_token_id=tokenizer.pad_token_id or 0),
        identify=partial(identify_target, target, model_args.target),
        rank=training_args.process_index,
        writes=not is_dry,
    )
    if data_args.packing:  # behind whatever reads single conversations
        with training_args.main_process_first(desc="packing conversations"):
            if not isinstance(train_set, ConversationStream):  # which packs its rows itself
                train_set = pack_rows(train_set, data_args.max_length, seed=data_seed)
            eval_set = None if eval_set is None else pack_rows(eval_set, data_args.max_length, seed=data_seed)
    if on_policy_args.is_on:
        check_on_policy(
            train_set,
            has_packing=data_args.packing,
            has_stored_features=feature_args.features is not None,
            has_persistent_workers=training_args.dataloader_persistent_workers,
        )
        train_set = OnPolicyRows(train_set)
    model_of_run = JointModel(heads, target, joint_args) if joint_args.is_on else heads
    trainer = (JointTrainer if joint_args.is_on else HeadsTrainer)(
        target=target,
        features=features.source,
        loss_type=training_args.loss_type or heads.default_loss,
        step_decay=training_args.step_decay or heads.default_step_decay,
        depth_weights=parse_depth_weights(training_args.depth_weights),
        measure_acceptance=measure_acceptance,
        muon_learning_rate=training_args.muon_learning_rate,
        run_description=description,
        model=model_of_run,
        args=training_args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=features.collate,
        callbacks=features.callbacks,
    )
    check_first_row(target, features, train_set, heads.feature_layers)
    if isinstance(train_set, OnPolicyRows):
        has_trained_heads = stored_heads is not None
        settings_of_rows: dict[str, Any] = {"max_length": data_args.max_length, "drafts_at_once": has_trained_heads}
        trainer.add_callback(WriteReplies(trainer, train_set, tokenizer, on_policy_args, **settings_of_rows))
        if checkpoint is not None:
            train_set.load(checkpoint)
    if training_args.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(training_args.early_stopping_patience))
    output_dir = Path(training_args.output_dir)
    if is_main_process and not is_dry:  # now, so that an interrupted run says what it was
        output_dir.mkdir(parents=True, exist_ok=True)
        _write_text(trainer, "training_config.yaml", yaml.safe_dump(settings, sort_keys=False))
    wants_report = pick(more, RunArguments).report
    return PreparedRun(
        trainer, output_dir, checkpoint, tokenizer, settings, wants_report, stored_bytes=features.bytes_to_store
    )


def _write_text(trainer: HeadsTrainer, name: str, text: str) -> None:
    with explain_full_disk(trainer, name, len(text)):
        write_file(Path(str(trainer.args.output_dir)) / name, text)


def _load_stored_heads(model_args: ModelArguments, checkpoint: Path | None) -> DraftHeads | None:
    """Those of the checkpoint to resume, or those to continue from: with the vocabulary they were trained for, whatever
    the data would give now."""
    stored = checkpoint or model_args.init_heads
    if stored is None:
        return None
    with loading_whole():
        heads: DraftHeads = DraftHeads.from_pretrained(stored, dtype=torch.float32)
    return heads


def _make_heads(
    model_args: ModelArguments,
    target: Target,
    stored: DraftHeads | None,
    checkpoint: Path | None,
    joint_args: JointArguments,
) -> DraftHeads:
    """The stored heads, or untrained ones, bound to the target."""
    if stored is None:
        assert model_args.head_type is not None
        return create_heads(model_args.head_type, target, **model_args.parse_head_overrides())
    if checkpoint is not None and model_args.head_type is not None:
        wanted = HEAD_TYPES[model_args.head_type].config_class.from_target(target, **model_args.parse_head_overrides())
        wanted.target_adapter = FOLDER if joint_args.is_on else None
        check_same_heads(checkpoint, stored.config, wanted)
    return stored.bind(target)


def _train(trainer: HeadsTrainer, checkpoint: Path | None) -> float:
    """Trains; returns the seconds this took, evaluations and what came before an interruption included."""
    trainer.clock.start()
    if checkpoint is None:
        trainer.train()
        return trainer.clock.seconds
    seconds_before: float = (read_run_file(checkpoint) or {}).get("seconds", 0.0)
    trainer.clock.start(seconds_before)
    trainer.args.eval_on_start = False  # that was before the first step
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if not is_finished(state, trainer.args):
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return trainer.clock.seconds
    # Interrupted after its last step: Trainer would make one more.
    trainer.state = state
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        # Only steps set heads up under them: here each process has them whole, as loaded, to be measured and saved.
        trainer.is_deepspeed_enabled = trainer.is_fsdp_enabled = False
        cast(nn.Module, trainer.model).to(trainer.args.device)
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint:
        trainer._load_best_model()
    return seconds_before


def _final_metrics(trainer: HeadsTrainer) -> dict[str, float]:
    """Metrics of the heads as they are now, measured unless the run has done so at this very step."""
    state = trainer.state
    is_best = trainer.args.load_best_model_at_end and state.best_global_step
    step = state.best_global_step if is_best else state.global_step
    for entry in reversed(state.log_history):
        if entry["step"] == step and "eval_loss" in entry:
            return {key: value for key, value in entry.items() if key.startswith("eval_")}
    metrics: dict[str, float] = trainer.evaluate()
    return metrics


def hide_secrets(words: Sequence[str]) -> list[str]:
    """A command line without the values of options that end in `token`: records and reports are uploaded.

    >>> hide_secrets(["--hub_token", "hf_1", "--push_to_hub_token=hf_2", "--max_steps", "3"])
    ['--hub_token', '...', '--push_to_hub_token=...', '--max_steps', '3']
    """
    shown, is_secret = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        is_option = option.startswith("--") and option.endswith("token")
        shown.append(f"{option}=..." if is_option and equals else "..." if is_secret else word)
        is_secret = is_option and not equals
    return shown


def _make_record(
    metrics: dict[str, float], state: TrainerState, seconds: float, distributed: dict[str, Any]
) -> dict[str, Any]:
    """`training_record.json`: command, versions, metrics, how processes shared the work, and what the training took."""
    return {
        "command": shlex.join(["train_heads.py", *hide_secrets(sys.argv[1:])]),
        "training": {
            "seconds": round(seconds, 1),
            "threads": torch.get_num_threads(),
            "steps": state.global_step,
            "tokens": state.num_input_tokens_seen,
            "epochs": state.epoch,
        },
        "distributed": distributed,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "platform": platform.platform(),
        "metrics": metrics,
    }
