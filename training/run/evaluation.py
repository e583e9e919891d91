"""The acceptance length of heads that are being trained, measured by decoding prompts with them."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from heads import DraftHeads
from inference import Decoder, GenerationStats, Target
from inference.targets.model_config import LengthLimit
from training.data.options import DataArguments
from training.options.arguments import goes_by_metric
from training.run.whole_heads import whole_heads

logger = logging.getLogger(__name__)


def eval_prompts(
    data_args: DataArguments, eval_set: datasets.Dataset | None, tokenizer: Any, limit: LengthLimit
) -> list[list[int]]:
    """Token ids of the prompts that acceptance is measured on: up to the first assistant token of held-out
    conversations, or the first turns of a prompt file, which the target's limit leaves room for.

    Raises:
        ValueError: naming file and line, before training rather than at its first evaluation.
    """
    if data_args.eval_prompts is not None:
        return list(islice(_read_prompts(Path(data_args.eval_prompts), tokenizer, limit), data_args.num_eval_prompts))
    if eval_set is None:
        return []
    rows = eval_set.select(range(min(data_args.num_eval_prompts, len(eval_set))))
    return [row["input_ids"][: row["loss_mask"].index(1)] for row in rows if row["loss_mask"][0] == 0]


def _read_prompts(path: Path, tokenizer: Any, limit: LengthLimit) -> Iterator[list[int]]:
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
        if limit.max_length is not None and len(prompt) >= limit.max_length:
            raise ValueError(
                f"{path}, line {number}: the prompt has {len(prompt)} tokens, the target takes fewer than "
                f"{limit.max_length} ({limit.reason}); leave it out"
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


def check_best_metric(args: TrainingArguments, metrics: Collection[str], *, can_decode: bool) -> None:
    """The best checkpoint is chosen by the acceptance length where that is measured; otherwise there is none.

    Args:
        metrics: what evaluations of the held-out conversations give.

    Raises:
        ValueError: when a metric is asked for that is unknown or cannot be measured.
    """
    asked: str | None = args.metric_for_best_model
    if asked is None:
        return
    metric = asked.removeprefix("eval_")
    if metric != "acceptance_length" and metric not in metrics:
        known = ", ".join(["acceptance_length", *metrics])
        raise ValueError(f"got metric_for_best_model {asked}, which these heads do not have; they have {known}")
    if can_decode or metric != "acceptance_length":
        return
    is_read = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST or goes_by_metric(args)
    if is_read or getattr(args, "early_stopping_patience", None):
        raise ValueError(
            f"metric_for_best_model is {asked}, but there is no prompt to measure it on: give num_eval_prompts above "
            "0 with eval_prompts or held-out conversations, or metric_for_best_model loss"
        )
    args.metric_for_best_model = None


def warn_of_lost_best(args: TrainingArguments) -> None:
    """Warns when the best evaluation may be one of a step that has no checkpoint."""
    kinds = [getattr(kind, "value", kind) for kind in (args.eval_strategy, args.save_strategy)]
    if args.metric_for_best_model is None or "no" in kinds or kinds[1] == "best":
        return
    steps = (args.eval_steps or args.logging_steps, args.save_steps)
    if kinds[0] == kinds[1] and (kinds[0] != "steps" or (steps[1] and _is_multiple(*steps))):
        return
    evaluated, saved = (
        kind if kind != "steps" else f"{every:g} {'steps' if every >= 1 or not every else 'of all steps'}"
        for kind, every in zip(kinds, steps, strict=True)
    )  # 0 steps: at the end alone
    logger.warning(
        "evaluations come every %s and checkpoints every %s, so the best evaluation may be that of a step without a "
        "checkpoint: give save_strategy and save_steps as for the evaluations, or --save_strategy best",
        evaluated,
        saved,
    )


def _is_multiple(evaluated: float, saved: float) -> bool:
    """Whether checkpoints come at every evaluation; true where nobody knows, of a share and a number of steps."""
    ratio = evaluated / saved
    return abs(ratio - round(ratio)) < 1e-6 * ratio or (evaluated < 1) != (saved < 1)
