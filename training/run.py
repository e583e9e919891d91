"""One training run: target, heads, data, trainer; then the finished heads and a record of how they came to be."""

from __future__ import annotations

import json
import logging
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerState, set_seed

from heads import HEAD_TYPES, DraftHeads, create_heads
from inference import Decoder, GenerationStats, Target
from training.arguments import DataArguments, HeadsTrainingArguments, ModelArguments, resolve_arguments
from training.data import ConversationCollator, count_tokens, load_conversations, tokenize_conversations
from training.resume import check_same_heads, find_checkpoint
from training.trainer import HeadsTrainer

logger = logging.getLogger(__name__)


def run_training(
    model_args: ModelArguments, data_args: DataArguments, training_args: HeadsTrainingArguments
) -> dict[str, float]:
    """Trains heads as the arguments say, saves them in `output_dir` and returns the final metrics.

    With `--resume_from_checkpoint true` (or a folder) an interrupted run goes on from its newest complete checkpoint.
    """
    return prepare_run(model_args, data_args, training_args).finish()


@dataclass(frozen=True)
class PreparedRun:
    """A run with everything loaded and checked, before its first step."""

    trainer: HeadsTrainer
    output_dir: Path
    checkpoint: Path | None

    def finish(self) -> dict[str, float]:
        """Trains, saves the heads and the record, and returns the final metrics."""
        trainer = self.trainer
        seconds = _train(trainer, self.checkpoint)
        if trainer.eval_dataset is not None:
            metrics = _final_metrics(trainer)
        else:
            metrics = {f"eval_{name}": value for name, value in (trainer.measure_acceptance or dict)().items()}
        trainer.save_model(str(self.output_dir))
        if trainer.args.process_index == 0:
            (self.output_dir / "training_args.bin").unlink(missing_ok=True)  # a pickle of those in training_config.yaml
            _write_record(self.output_dir, metrics, trainer.state, seconds)
        return metrics


def prepare_run(
    model_args: ModelArguments, data_args: DataArguments, training_args: HeadsTrainingArguments
) -> PreparedRun:
    """Loads and checks what a run needs, and writes its configuration.

    Raises:
        ValueError, OSError: for options, files and folders that are wrong.
    """
    if training_args.n_gpu > 1:
        raise ValueError(
            f"one process sees {training_args.n_gpu} GPUs, and heads do not train under DataParallel: start with "
            "`accelerate launch --num_processes N`, or choose one GPU with CUDA_VISIBLE_DEVICES"
        )
    if getattr(training_args.deepspeed_plugin, "zero_stage", 0) == 3:
        raise ValueError(
            "ZeRO-3 would split the frozen target as well: use stage 1 or 2 (configs/deepspeed/zero2.json)"
        )
    set_seed(training_args.seed)  # Trainer does so too, but after the heads have drawn their first weights
    is_main_process = training_args.process_index == 0
    checkpoint = find_checkpoint(
        training_args.output_dir, training_args.resume_from_checkpoint, is_main_process=is_main_process
    )
    model = AutoModelForCausalLM.from_pretrained(
        model_args.target,
        dtype=model_args.target_dtype,
        attn_implementation=model_args.attn_implementation,
        trust_remote_code=model_args.trust_remote_code,
    )
    model.requires_grad_(False).eval().to(training_args.device)
    target = Target(model)
    tokenizer = AutoTokenizer.from_pretrained(model_args.target, trust_remote_code=model_args.trust_remote_code)
    heads = _make_heads(model_args, target, checkpoint)

    data_args = _fit_to_target(data_args, target, is_main_process=is_main_process)
    with training_args.main_process_first(desc="tokenizing conversations"):
        train_set, eval_set = load_datasets(data_args, tokenizer, seed=training_args.seed)
    if heads.wants_token_counts:
        heads.fit_vocabulary(count_tokens(train_set, target.vocab_size))

    measure_acceptance = _acceptance_meter(
        target, heads, _eval_prompts(data_args, eval_set, tokenizer, target), data_args.eval_max_new_tokens
    )
    trainer = HeadsTrainer(
        target=target,
        loss_type=training_args.loss_type or heads.default_loss,
        step_decay=training_args.step_decay or heads.default_step_decay,
        measure_acceptance=measure_acceptance,
        muon_learning_rate=training_args.muon_learning_rate,
        model=heads,
        args=training_args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=ConversationCollator(pad_token_id=tokenizer.pad_token_id or 0),
    )
    output_dir = Path(training_args.output_dir)
    settings = resolve_arguments(model_args, data_args, training_args)
    if is_main_process:  # now, so that an interrupted run says what it was
        output_dir.mkdir(parents=True, exist_ok=True)
        _write(output_dir / "training_config.yaml", yaml.safe_dump(settings, sort_keys=False))
    return PreparedRun(trainer, output_dir, checkpoint)


def _make_heads(model_args: ModelArguments, target: Target, checkpoint: Path | None) -> DraftHeads:
    """Untrained heads, those to continue from, or those of the checkpoint to resume: with the vocabulary they were
    trained for, whatever the data would give now."""
    stored = checkpoint or model_args.init_heads
    if stored is None:
        assert model_args.head_type is not None
        return create_heads(model_args.head_type, target, **model_args.parse_head_overrides())
    heads: DraftHeads = DraftHeads.from_pretrained(stored, dtype=torch.float32)
    if checkpoint is not None and model_args.head_type is not None:
        wanted = HEAD_TYPES[model_args.head_type].config_class
        check_same_heads(checkpoint, heads.config, wanted.from_target(target, **model_args.parse_head_overrides()))
    return heads.bind(target)


def _fit_to_target(data_args: DataArguments, target: Target, *, is_main_process: bool) -> DataArguments:
    """Rows no longer than the target's position limit."""
    limit = target.max_length
    if limit is None or data_args.max_length <= limit:
        return data_args
    if is_main_process:
        logger.warning(
            "max_length is %d, the target takes %d tokens (%s): longer conversations are cut there",
            data_args.max_length,
            limit,
            target.length_limit_reason,
        )
    return replace(data_args, max_length=limit)


def _train(trainer: HeadsTrainer, checkpoint: Path | None) -> float:
    """Trains; returns the seconds this took, evaluations included."""
    begin = time.perf_counter()
    if checkpoint is None:
        trainer.train()
        return time.perf_counter() - begin
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if not 0 < trainer.args.max_steps <= state.global_step:
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return time.perf_counter() - begin
    # Interrupted after its last step: Trainer would make one more.
    trainer.state = state
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint:
        trainer._load_best_model()
    return 0.0


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


def load_datasets(
    data_args: DataArguments, tokenizer: Any, *, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Tokenized training and held-out conversations; the latter None when there is nothing to hold out."""

    def load(paths: Sequence[str], split: str, max_samples: int | None) -> datasets.Dataset:
        conversations = load_conversations(
            paths, split=split, max_samples=max_samples, skip_bad_lines=data_args.skip_bad_lines
        )
        return tokenize_conversations(
            conversations, tokenizer, max_length=data_args.max_length, num_proc=data_args.num_proc
        )

    train_set = load(data_args.dataset, data_args.dataset_split, data_args.max_samples)
    if data_args.eval_dataset:
        return train_set, load(data_args.eval_dataset, data_args.eval_split, data_args.max_eval_samples or None)
    if data_args.validation_fraction == 0 or len(train_set) < 2:
        return train_set, None
    parts = train_set.train_test_split(test_size=data_args.validation_fraction, seed=seed)
    held_out = parts["test"]
    if data_args.max_eval_samples:
        held_out = held_out.select(range(min(data_args.max_eval_samples, len(held_out))))
    return parts["train"], held_out


def _eval_prompts(
    data_args: DataArguments, eval_set: datasets.Dataset | None, tokenizer: Any, target: Target
) -> list[list[int]]:
    """Token ids of the prompts that acceptance is measured on: up to the first assistant token of held-out
    conversations, or the first turns of a prompt file.

    Raises:
        ValueError: naming file and line, before training rather than at its first evaluation.
    """
    if data_args.eval_prompts is not None:
        return list(islice(_read_prompts(Path(data_args.eval_prompts), tokenizer, target), data_args.num_eval_prompts))
    if eval_set is None:
        return []
    rows = eval_set.select(range(min(data_args.num_eval_prompts, len(eval_set))))
    return [row["input_ids"][: row["loss_mask"].index(1)] for row in rows if row["loss_mask"][0] == 0]


def _read_prompts(path: Path, tokenizer: Any, target: Target) -> Iterator[list[int]]:
    if not path.is_file():
        raise ValueError(f"eval_prompts is {path}, which is no file; give JSON lines of {{'turns': ['...']}}")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            turn = json.loads(line)["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: expected {{'turns': ['...']}} ({error!r})") from error
        messages = [{"role": "user", "content": turn}]
        prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        if target.max_length is not None and len(prompt) >= target.max_length:
            raise ValueError(
                f"{path}, line {number}: the prompt has {len(prompt)} tokens, the target takes fewer than "
                f"{target.max_length} ({target.length_limit_reason}); leave it out"
            )
        yield prompt


def _acceptance_meter(
    target: Target, heads: DraftHeads, prompts: list[list[int]], max_new_tokens: int
) -> Callable[[], dict[str, float]] | None:
    """Decodes the prompts greedily with the heads as they are; every process does the same, so none waits."""
    if not prompts:
        return None

    def measure() -> dict[str, float]:
        decoder = Decoder(target, heads)
        stats = GenerationStats()
        for prompt in prompts:
            input_ids = torch.tensor([prompt], device=target.device)
            mask = torch.ones_like(input_ids)
            stats += decoder.generate(input_ids, mask, max_new_tokens=max_new_tokens, do_sample=False).stats
        return {"acceptance_length": stats.acceptance_length}

    return measure


def _write_record(directory: Path, metrics: dict[str, float], state: TrainerState, seconds: float) -> None:
    """`training_record.json`: command, versions, metrics, and what the training took (since it was last resumed)."""
    record = {
        "command": shlex.join(["train_heads.py", *sys.argv[1:]]),
        "training": {
            "seconds": round(seconds, 1),
            "threads": torch.get_num_threads(),
            "steps": state.global_step,
            "tokens": state.num_input_tokens_seen,
            "epochs": state.epoch,
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "platform": platform.platform(),
        "metrics": metrics,
    }
    _write(directory / "training_record.json", json.dumps(record, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Writes a file completely or not at all."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
