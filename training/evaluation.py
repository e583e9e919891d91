"""The acceptance length of heads that are being trained, measured by decoding prompts with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import TrainingArguments

from heads import DraftHeads
from inference import Decoder, GenerationStats, Target
from training.arguments import DataArguments
from training.whole_heads import whole_heads


def eval_prompts(
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


@dataclass(frozen=True)
class AcceptanceMeter:
    """Decodes the prompts greedily with the heads as they are; every process does the same, so none waits."""

    target: Target
    heads: DraftHeads
    prompts: list[list[int]]
    max_new_tokens: int

    def __call__(self) -> dict[str, float]:
        decoder = Decoder(self.target, whole_heads(self.heads))
        stats = GenerationStats()
        for prompt in self.prompts:
            input_ids = torch.tensor([prompt], device=self.target.device)
            mask = torch.ones_like(input_ids)
            stats += decoder.generate(input_ids, mask, max_new_tokens=self.max_new_tokens, do_sample=False).stats
        return {"acceptance_length": stats.acceptance_length}


def acceptance_meter(
    target: Target, heads: DraftHeads, prompts: list[list[int]], max_new_tokens: int
) -> AcceptanceMeter | None:
    """None when there is nothing to decode."""
    return AcceptanceMeter(target, heads, prompts, max_new_tokens) if prompts else None


def check_best_metric(args: TrainingArguments, *, can_decode: bool) -> None:
    """The best checkpoint is chosen by the acceptance length where that is measured; otherwise there is none.

    Raises:
        ValueError: when it is asked for and cannot be measured.
    """
    metric: str | None = args.metric_for_best_model
    if can_decode or metric is None or metric.removeprefix("eval_") != "acceptance_length":
        return
    if args.load_best_model_at_end or getattr(args, "early_stopping_patience", None):
        raise ValueError(
            f"metric_for_best_model is {metric}, but there is no prompt to measure it on: give num_eval_prompts above "
            "0 with eval_prompts or held-out conversations, or metric_for_best_model loss"
        )
    args.metric_for_best_model = None
