"""From options to a run that is ready to train: target, heads, rows, features, trainer."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import datasets
import torch
import yaml
from transformers import EarlyStoppingCallback, TrainerState, set_seed

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.heads.checkpoint import no_empty_folder, read_head_type
from draftsmith.heads.config import name_of_target
from draftsmith.heads.formats.registry import check_place
from draftsmith.heads.registration import find_kind
from draftsmith.inference import Target
from draftsmith.inference.kernels.packed_weights import has_bfloat16
from draftsmith.inference.targets.files import read_tokenizer
from draftsmith.inference.targets.model_config import LengthLimit, find_length_limit
from draftsmith.training.data.collation import ConversationCollator, count_tokens
from draftsmith.training.data.packing import pack_rows
from draftsmith.training.data.set_statistics import row_lengths
from draftsmith.training.data.streaming import VOCABULARY_ROWS, ConversationStream
from draftsmith.training.data.training_sets import cut_to_limit, load_datasets
from draftsmith.training.distributed.waiting import one_process_first
from draftsmith.training.features.endpoint_states import (
    NUM_LAYERS,
    EndpointStates,
    ServedFeatures,
    refuse_without_target,
)
from draftsmith.training.features.self_check import check_first_row
from draftsmith.training.features.sources import (
    FeatureSource,
    OnlineFeatures,
    ReadFeatures,
    StoredFeatures,
    TextsCollator,
)
from draftsmith.training.features.store import FeatureStore
from draftsmith.training.features.store_checks import check_complete, check_same_target, explain_date, identify_target
from draftsmith.training.features.target_loading import (
    FirstLayers,
    check_placement,
    load_first_layers,
    load_model,
    load_published_heads,
    loading_whole,
)
from draftsmith.training.images.processor import ImageCollator, load_processor, refuse_placeholders
from draftsmith.training.options.command_line import resolve_arguments
from draftsmith.training.options.run_options import RunOptions, check_options, parse_seconds, refuse_with_images
from draftsmith.training.run.evaluation import AcceptanceMeter, check_best_metric, eval_prompts, settle_evaluations
from draftsmith.training.run.joint import JointModel, JointTrainer, adapt_target
from draftsmith.training.run.outcome import USUAL_TOKENS, PreparedRun
from draftsmith.training.run.pace import measure_pace
from draftsmith.training.run.resume import check_same_run, describe_run, find_checkpoint
from draftsmith.training.run.trainer import HeadsTrainer
from draftsmith.training.whole_files import write_text

logger = logging.getLogger(__name__)

Collate = Callable[[Any], dict[str, Any]]


@dataclass
class _Models:
    """The frozen target (with adapters, if any), its tokenizer, and the heads bound to it."""

    target: Target
    tokenizer: Any
    heads: DraftHeads


@dataclass
class _Rows:
    """processor: reads the images of the rows; None = they have none. counts: of `load_datasets`."""

    train_set: Any
    eval_set: Any | None
    counts: Counter[str]
    processor: Any = None


def prepare_run(options: RunOptions) -> PreparedRun:
    """Loads and checks everything that a run needs, and writes its configuration.

    Raises:
        ValueError, OSError: for options, files and folders that are wrong.
    """
    with no_empty_folder(Path(options.training.output_dir)):  # Trainer makes it
        return _prepare(options)


def _prepare(options: RunOptions) -> PreparedRun:
    args = options.training
    if options.placement.target_device_map is not None and args.n_gpu > 1:
        args._n_gpu = 1  # the other GPUs hold parts of the target
    check_options(options)
    set_seed(args.seed)  # Trainer does so too, but after the heads have drawn their first weights
    is_main_process = args.process_index == 0
    checkpoint = find_checkpoint(args.output_dir, args.resume_from_checkpoint, is_main_process=is_main_process)
    models = _load_models(options, checkpoint)
    if options.model.served_by is not None:
        check_place(models.heads, models.target, options.model.served_by)
    has_states = options.features.features is not None or options.features.features_endpoint is not None
    is_new = checkpoint is None and is_main_process
    if is_new and args.device.type == "cpu" and not has_bfloat16():
        warn_of_slow_dtypes(args.bf16, None if has_states else models.target)
    if args.learning_rate is None:
        multiplier = options.joint.heads_lr_multiplier if options.joint.is_on else 1
        args.learning_rate = models.heads.default_learning_rate / multiplier
    limit = find_length_limit(models.target.text_config)
    options = replace(options, data=cut_to_limit(options.data, limit, has_warning=is_main_process))
    rows = _load_rows(options, models, checkpoint)
    meter = _make_meter(options, models, rows, limit)
    settle_evaluations(args, has_rows=rows.eval_set is not None, has_prompts=meter is not None)
    settings = resolve_arguments(options)
    description = describe_run(settings, rows.train_set, args.world_size)
    if checkpoint is not None:
        check_same_run(checkpoint, description, may_differ=args.resume_with_changes)
    num_depths = models.heads.num_unrolled_steps
    check_best_metric(args, num_depths=num_depths, has_prompts=meter is not None, is_joint=options.joint.is_on)
    source, collate = _prepare_features(options, models, rows)
    _arrange_rows(options, rows)  # after everything that reads single conversations
    trainer = _make_trainer(options, models, rows, source, collate, meter, description)
    if options.features.features_endpoint is None:
        check_first_row(models.target, source, collate, rows.train_set, models.heads.feature_layers)
    if is_new:
        _announce_few_tokens(trainer, options.model.target)
    if options.run.time_budget is not None or (options.run.choose and checkpoint is None):
        _settle_time(options, trainer, source, checkpoint)
    if is_main_process:  # now, so that an interrupted run has its configuration
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        write_text(Path(args.output_dir) / "training_config.yaml", yaml.safe_dump(settings, sort_keys=False))
    return PreparedRun(
        trainer,
        Path(args.output_dir),
        checkpoint,
        models.tokenizer,
        settings,
        rows.counts,
        wants_report=options.run.report,
    )


def _announce_few_tokens(trainer: HeadsTrainer, target: str) -> None:
    """Says at the start that a run is too short for heads to learn much."""
    args, rows = trainer.args, trainer.train_dataset
    if not isinstance(rows, datasets.Dataset):
        return  # a stream, whose length is not known
    tokens = sum(row_lengths(rows)) * args.num_train_epochs
    if args.max_steps > 0:
        per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        tokens = args.max_steps * per_step * sum(row_lengths(rows)) / len(rows)
    if tokens < USUAL_TOKENS:
        logger.info(
            "this run reads %s tokens, and %.0f million are usual: raise the steps or epochs, or let the target write "
            "more conversations (draftsmith data --target %s)",
            *(f"{tokens:,.0f}", USUAL_TOKENS / 1e6, target),
        )


def _settle_time(options: RunOptions, trainer: HeadsTrainer, source: FeatureSource, checkpoint: Path | None) -> None:
    """Measures how long the run will take and says so; a time budget sets its steps. A resumed run keeps its steps."""
    if checkpoint is not None:
        trainer.args.max_steps = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).max_steps
        return
    if not isinstance(trainer.train_dataset, datasets.Dataset) or options.joint.is_on:
        return  # a stream, or steps that train the target too
    pace = measure_pace(trainer, source)
    if options.run.time_budget is not None:
        pace = replace(pace, num_steps=pace.fit(parse_seconds(options.run.time_budget)))
        trainer.args.max_steps = pace.num_steps
    for line in pace.describe().splitlines():
        logger.info(line)


def _load_models(options: RunOptions, checkpoint: Path | None) -> _Models:
    """Stored heads keep the draft vocabulary that they were trained for, and bring the target's adapter along."""
    args, device = options.model, options.training.device
    stored: DraftHeads | None = None
    place = checkpoint or args.init_heads
    is_foreign = place is not None and read_head_type(str(place)) is None
    if place is not None and not is_foreign:
        with loading_whole():
            stored = DraftHeads.from_pretrained(place, dtype=torch.float32)
    if options.features.features_endpoint is not None:
        refuse_without_target(args, options.placement)
        target: Target = load_first_layers(args, NUM_LAYERS, device)
    else:
        model = load_model(args, options.placement, device, num_processes=options.training.world_size)
        target = Target(adapt_target(model, stored, options.joint))
    check_placement(target, device)
    tokenizer = read_tokenizer(args.target, trust_remote_code=args.trust_remote_code)
    if is_foreign:
        stored = load_published_heads(args, target)
    if stored is not None:
        for tensor in (*stored.parameters(), *stored.buffers()):
            tensor.data = tensor.data.clone()  # products round differently where a file has its tensors
        stored.bind(target)
        if checkpoint is None:
            _name_target(stored, target)
        if checkpoint is None and args.head_type is not None:
            stored = find_kind(args.head_type).grow_from(stored, **args.parse_head_overrides())
        return _Models(target, tokenizer, stored)
    assert args.head_type is not None
    heads = create_heads(args.head_type, target, **args.parse_head_overrides())
    return _Models(target, tokenizer, heads)


def warn_of_slow_dtypes(is_bf16: bool, target: Target | None) -> None:
    """Names the options that make training slow on a CPU without bfloat16; target: the one that computes the states."""
    slow = ["--bf16 false"] * is_bf16
    if target is not None and target.dtype == torch.bfloat16 and getattr(target.model, "hf_quantizer", None) is None:
        slow.append("--target_dtype float32")
    if slow:
        logger.warning(
            "this CPU has no instructions for bfloat16: %s makes training several times as fast", " ".join(slow)
        )


def _name_target(heads: DraftHeads, target: Target) -> None:
    """Records the target that heads train for now. The heads fit it, so it has the shape of the heads' own target."""
    config, name, family = heads.config, name_of_target(target), target.text_config.model_type
    if Path(config.target_name_or_path).resolve() != Path(name).resolve():
        logger.warning(
            "these heads were trained for %s (%s), and are trained further for %s (%s), a target of the same shape. If "
            "this is not a fine-tuned version of that target, start new heads instead (--head_type %s)",
            *(config.target_name_or_path or "a target that is not recorded", config.target_model_type or "unknown"),
            *(name, family, config.head_type),
        )
    config.target_name_or_path, config.target_model_type = name, family


def _load_rows(options: RunOptions, models: _Models, checkpoint: Path | None) -> _Rows:
    """Tokenized conversations. New heads note how often these have each token, for a reduced draft vocabulary; those of
    a checkpoint have noted it."""
    args, counts = options.training, Counter[str]()
    with one_process_first():
        train_set, eval_set = load_datasets(
            options.data,
            models.tokenizer,
            seed=args.seed_of_data,
            rank=args.process_index,
            num_processes=args.world_size,
            counts=counts,
        )
    if checkpoint is None or args.resume_with_changes or models.heads.token_counts is None:
        is_stream = isinstance(train_set, ConversationStream)
        counted = train_set.first_rows(VOCABULARY_ROWS) if is_stream else train_set
        models.heads.fit_vocabulary(count_tokens(counted, models.target.vocab_size))
    if args.loss_vocabulary == "draft":
        if (number := models.heads.learn_draft_vocabulary()) is None:
            logger.warning(
                "the loss compares all tokens that the heads score: decoders draft all, or the heads have LM heads"
            )
        else:
            logger.info("the loss compares the %s tokens that decoders draft", f"{number:,}")
    for stored in (train_set, eval_set):
        refuse_placeholders(stored, models.target.model.config)
    if not any("media" in getattr(rows, "column_names", ()) for rows in (train_set, eval_set)):
        return _Rows(train_set, eval_set, counts)
    refuse_with_images(options)
    return _Rows(train_set, eval_set, counts, load_processor(options.model.target))


def _make_meter(options: RunOptions, models: _Models, rows: _Rows, limit: LengthLimit) -> AcceptanceMeter | None:
    """Measures the acceptance length; None without prompts, and without the whole target, which would decode them."""
    if options.features.features_endpoint is None:
        prompts = eval_prompts(options.data, rows.eval_set, models.tokenizer, limit, rows.processor)
        length = options.data.eval_max_new_tokens
        return AcceptanceMeter(models.target, models.heads, prompts, models.tokenizer, length) if prompts else None
    if rows.eval_set is not None and options.training.process_index == 0:
        logger.warning(
            "evaluations measure the loss and the accuracies only: the acceptance length needs the whole target, which "
            "is on the server. Measure it later where the target is (draftsmith bench --heads %s)",
            options.training.output_dir,
        )
    return None


def _prepare_features(options: RunOptions, models: _Models, rows: _Rows) -> tuple[FeatureSource, Collate]:
    """Returns what gives the states of a batch, and what makes the batches, after all checks that are possible now.

    Raises:
        ValueError: stored features of another target, of other layers or of other texts; a server's of another model.
        ConnectionError: no server.
    """
    args, target, heads, tokenizer = options.features, models.target, models.heads, models.tokenizer
    collate: Collate = ConversationCollator(pad_token_id=tokenizer.pad_token_id or 0)
    if rows.processor is not None:
        collate = ImageCollator(collate, rows.processor)
    if isinstance(target, FirstLayers):
        return _ask_server(options, target, heads, rows), TextsCollator(collate)
    if args.features is None:
        return OnlineFeatures(target, heads.feature_layers), collate
    store, hint = FeatureStore(Path(args.features)), explain_date(tokenizer)
    check_same_target(store.folder, store.settings.target, identify_target(target, options.model.target))
    check_complete(store, heads, {"training": rows.train_set, "held-out": rows.eval_set}, hint)
    return StoredFeatures(target, heads.feature_layers, store, hint), TextsCollator(collate)


def _ask_server(options: RunOptions, target: FirstLayers, heads: DraftHeads, rows: _Rows) -> ServedFeatures:
    """A server's features, after a comparison with the target's first layers, which are then dropped."""
    train_set, max_length = rows.train_set, options.data.max_length
    if isinstance(train_set, ConversationStream):
        first = train_set.first_rows(1)[0]
    else:
        first = train_set[0]
        max_length = max(max(row_lengths(part)) for part in (train_set, rows.eval_set) if part is not None)
    states = EndpointStates(
        target,
        options.features,
        url=cast(str, options.features.features_endpoint),
        layers=heads.feature_layers,
        target_name=options.model.target,
        max_length=max_length,
    )
    states.check_target(torch.tensor(first["input_ids"]))
    target.drop_layers()
    return ServedFeatures(states, heads.feature_layers)


def _arrange_rows(options: RunOptions, rows: _Rows) -> None:
    """Packs conversations into rows."""
    args, data = options.training, options.data
    if data.packing:
        pack = partial(pack_rows, max_length=data.max_length, seed=args.seed_of_data)
        with one_process_first():
            if not isinstance(rows.train_set, ConversationStream):  # a stream packs its rows itself
                rows.train_set = pack(rows.train_set)
            rows.eval_set = None if rows.eval_set is None else pack(rows.eval_set)


def _make_trainer(
    options: RunOptions,
    models: _Models,
    rows: _Rows,
    source: FeatureSource,
    collate: Collate,
    meter: AcceptanceMeter | None,
    description: dict[str, Any],
) -> HeadsTrainer:
    args, heads, joint = options.training, models.heads, options.joint
    trainer = (JointTrainer if joint.is_on else HeadsTrainer)(
        target=models.target,
        features=source if isinstance(source, ReadFeatures) else None,
        measure_acceptance=meter,
        run_description=description,
        model=JointModel(heads, models.target, joint) if joint.is_on else heads,
        args=args,
        train_dataset=rows.train_set,
        eval_dataset=rows.eval_set,
        data_collator=collate,
    )
    if args.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(args.early_stopping_patience))
    return trainer
