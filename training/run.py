"""One training run: target, heads, data, trainer; then the finished heads and a record of how they came to be."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint

from heads import DraftHeads, create_heads
from inference import Decoder, GenerationStats, Target
from training.arguments import DataArguments, HeadsTrainingArguments, ModelArguments, resolve_arguments
from training.data import ConversationCollator, count_tokens, load_conversations, tokenize_conversations
from training.trainer import HeadsTrainer

logger = logging.getLogger(__name__)


def run_training(
    model_args: ModelArguments, data_args: DataArguments, training_args: HeadsTrainingArguments
) -> dict[str, float]:
    """Trains heads as the arguments say, saves them in `output_dir` and returns the final metrics.

    With `--resume_from_checkpoint true` (or a folder) an interrupted run goes on from its newest complete checkpoint.
    """
    model = AutoModelForCausalLM.from_pretrained(
        model_args.target,
        dtype=model_args.target_dtype,
        attn_implementation=model_args.attn_implementation,
        trust_remote_code=model_args.trust_remote_code,
    )
    model.requires_grad_(False).eval().to(training_args.device)
    target = Target(model)
    tokenizer = AutoTokenizer.from_pretrained(model_args.target, trust_remote_code=model_args.trust_remote_code)
    heads = _make_heads(model_args, target)

    with training_args.main_process_first(desc="tokenizing conversations"):
        train_set, eval_set = load_datasets(data_args, tokenizer, seed=training_args.seed)
    if heads.wants_token_counts:
        heads.fit_vocabulary(count_tokens(train_set, target.vocab_size))

    prompts = _eval_prompts(data_args, eval_set, tokenizer)
    trainer = HeadsTrainer(
        target=target,
        loss_type=training_args.loss_type or heads.default_loss,
        step_decay=training_args.step_decay or heads.default_step_decay,
        measure_acceptance=_acceptance_meter(target, heads, prompts, data_args.eval_max_new_tokens),
        model=heads,
        args=training_args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=ConversationCollator(pad_token_id=tokenizer.pad_token_id or 0),
    )
    trainer.train(resume_from_checkpoint=_checkpoint_to_resume(training_args))
    metrics = trainer.evaluate() if eval_set is not None else {}
    trainer.save_model(training_args.output_dir)
    if trainer.is_world_process_zero():
        _write_record(Path(training_args.output_dir), model_args, data_args, training_args, metrics)
    return metrics


def _make_heads(model_args: ModelArguments, target: Target) -> DraftHeads:
    if model_args.init_heads is not None:
        heads: DraftHeads = DraftHeads.from_pretrained(model_args.init_heads, dtype=torch.float32)
        return heads.bind(target)
    assert model_args.head_type is not None
    return create_heads(model_args.head_type, target, **model_args.parse_head_overrides())


def load_datasets(
    data_args: DataArguments, tokenizer: Any, *, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Tokenized training and held-out conversations; the latter None when there is nothing to hold out."""

    def load(paths: Sequence[str], max_samples: int | None) -> datasets.Dataset:
        conversations = load_conversations(
            paths, split=data_args.dataset_split, max_samples=max_samples, skip_bad_lines=data_args.skip_bad_lines
        )
        return tokenize_conversations(
            conversations, tokenizer, max_length=data_args.max_length, num_proc=data_args.num_proc
        )

    train_set = load(data_args.dataset, data_args.max_samples)
    if data_args.eval_dataset:
        return train_set, load(data_args.eval_dataset, data_args.max_eval_samples)
    if data_args.validation_fraction == 0 or len(train_set) < 2:
        return train_set, None
    parts = train_set.train_test_split(test_size=data_args.validation_fraction, seed=seed)
    held_out = parts["test"]
    if data_args.max_eval_samples is not None:
        held_out = held_out.select(range(min(data_args.max_eval_samples, len(held_out))))
    return parts["train"], held_out


def _eval_prompts(data_args: DataArguments, eval_set: datasets.Dataset | None, tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompts that acceptance is measured on: up to the first assistant token of held-out
    conversations, or the first turns of a prompt file."""
    if data_args.eval_prompts is not None:
        with open(data_args.eval_prompts, encoding="utf-8") as lines:
            turns = [json.loads(line)["turns"][0] for line in lines if line.strip()][: data_args.num_eval_prompts]
        return [
            list(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": turn}], add_generation_prompt=True, return_dict=False
                )
            )
            for turn in turns
        ]
    if eval_set is None:
        return []
    rows = eval_set.select(range(min(data_args.num_eval_prompts, len(eval_set))))
    return [row["input_ids"][: row["loss_mask"].index(1)] for row in rows if row["loss_mask"][0] == 0]


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
            stats += decoder.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False).stats
        return {"acceptance_length": stats.acceptance_length}

    return measure


def _checkpoint_to_resume(training_args: HeadsTrainingArguments) -> str | None:
    """The checkpoint `--resume_from_checkpoint` asks for: a folder as given; true = the newest complete one."""
    wanted = training_args.resume_from_checkpoint
    if wanted is None or str(wanted).lower() in ("false", ""):
        return None
    if str(wanted).lower() != "true":
        return str(wanted)
    newest = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
    if newest is None:
        logger.warning("no checkpoint in %s: starting from the beginning", training_args.output_dir)
    return newest


def _write_record(
    directory: Path,
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: HeadsTrainingArguments,
    metrics: dict[str, float],
) -> None:
    """`training_config.yaml`, which `--config` reads back, and `training_record.json`: command, versions, metrics."""
    settings = resolve_arguments(model_args, data_args, training_args)
    record = {
        "command": shlex.join(["train_heads.py", *sys.argv[1:]]),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "platform": platform.platform(),
        "metrics": metrics,
    }
    for name, text in (
        ("training_config.yaml", yaml.safe_dump(settings, sort_keys=False)),
        ("training_record.json", json.dumps(record, indent=2) + "\n"),
    ):
        scratch = directory / f".{name}.tmp"
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(directory / name)
