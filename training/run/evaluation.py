"""The metrics of an evaluation, and the acceptance length among them, which decoding prompts measures."""

import itertools
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder, GenerationStats, Target
from draftsmith.inference.targets.model_config import LengthLimit
from draftsmith.training.data.options import DataArguments
from draftsmith.training.distributed.whole_heads import whole_heads
from draftsmith.training.images.processor import read_images
from draftsmith.training.options.training_options import HeadsTrainingArguments
from draftsmith.training.reporting.examples import Prompt, stream_prompt
from draftsmith.training.synthesis.prompts import encode_prompts, read_prompts, report_rejected


def eval_prompts(
    data_args: DataArguments, eval_set: datasets.Dataset | None, tokenizer: Any, limit: LengthLimit, processor: Any
) -> list[Prompt]:
    """The prompts on which the acceptance length is measured.

    They are the first turns of `eval_prompts`, or the held-out conversations up to the first assistant token (after the
    images, if there are any). Prompts that the chat template rejects are left out, with a warning.

    Args:
        processor: reads the images of held-out conversations; None = they have none.

    Raises:
        ValueError: a bad line, with file and line; a prompt too long for the target; the template rejects all prompts.
    """
    if data_args.eval_prompts is None:
        rows = [] if eval_set is None else eval_set.take(min(data_args.num_eval_prompts, len(eval_set)))
        cut = (_cut_before_reply(row, processor) for row in rows)
        return [prompt for prompt in cut if prompt is not None]
    prompts: list[Prompt] = []
    rejected: list[str] = []
    encoded = encode_prompts(read_prompts(data_args.eval_prompts, option="eval_prompts"), tokenizer, rejected)
    for conversation, ids in itertools.islice(encoded, data_args.num_eval_prompts):
        if limit.max_length is not None and len(ids) >= limit.max_length:
            raise ValueError(
                f"{data_args.eval_prompts}: the prompt {conversation.id} has {len(ids)} tokens, the target takes "
                f"fewer than {limit.max_length} ({limit.reason}); leave it out"
            )
        prompts.append({"input_ids": torch.tensor([ids])})
    report_rejected(data_args.eval_prompts, rejected, num_left=len(prompts))
    return prompts


def _cut_before_reply(row: dict[str, Any], processor: Any) -> Prompt | None:
    media_end = row.get("media_end") or 0
    if row["loss_mask"][0] == 1 or 1 not in row["loss_mask"][media_end:]:
        return None
    ids = row["input_ids"][: row["loss_mask"].index(1, media_end)]
    media = read_images(processor, {**row, "input_ids": ids}) if media_end else {}
    return {"input_ids": torch.tensor([ids]), **media}


@dataclass(frozen=True)
class AcceptanceMeter:
    """Decodes the prompts greedily with the heads as they are. Every process decodes all of them, so none waits."""

    target: Target
    heads: DraftHeads
    prompts: list[Prompt]
    tokenizer: Any
    max_new_tokens: int

    def __call__(self) -> dict[str, float]:
        return {"acceptance_length": self.decode(self.make_decoder(), self.prompts)}

    def make_decoder(self, tree: str = "") -> Decoder:
        """A decoder with the heads. Collective.

        Args:
            tree: "" = one that does not follow the clock: lengths can be compared, and all processes run the same
                passes.
        """
        steady = "chain" if self.heads.drafts_chains_only else "dynamic"
        return Decoder(self.target, whole_heads(self.heads), tree=tree or steady)

    def decode(self, decoder: Decoder, prompts: list[Prompt]) -> float:
        """The acceptance length of some of the prompts."""
        stats = GenerationStats()
        for prompt in prompts:
            stream = stream_prompt(decoder, prompt, self.tokenizer, max_new_tokens=self.max_new_tokens)
            for _ in stream:
                pass
            stats += stream.output.stats
        return stats.acceptance_length


def settle_evaluations(args: Any, *, has_rows: bool, has_prompts: bool) -> None:
    """Settles `eval_strategy` and `load_best_model_at_end` where they are left open.

    Raises:
        ValueError: an option needs evaluations, and there are none.
    """
    has_metric = has_prompts or args.metric_for_best_model not in (None, "acceptance_length")
    saves: SaveStrategy = args.save_strategy
    if args.eval_strategy is None:
        args.eval_strategy = IntervalStrategy.NO
        if has_rows and args.eval_steps is not None:
            args.eval_strategy = IntervalStrategy.STEPS
        elif has_rows and has_metric and saves != SaveStrategy.NO:
            is_epoch = saves == SaveStrategy.EPOCH
            args.eval_strategy = IntervalStrategy.EPOCH if is_epoch else IntervalStrategy.STEPS
            args.eval_steps = args.save_steps
    if args.load_best_model_at_end is None:
        args.load_best_model_at_end = has_metric and _evaluates_each_checkpoint(args)
    for name in ("load_best_model_at_end", "early_stopping_patience"):
        if args.eval_strategy == IntervalStrategy.NO and (value := getattr(args, name)):
            raise ValueError(
                f"got {name} {str(value).lower()} without evaluations: give eval_strategy (steps or epoch), and "
                "validation_fraction or eval_dataset"
            )


def _evaluates_each_checkpoint(args: Any) -> bool:
    evaluates, saves = args.eval_strategy, args.save_strategy
    if evaluates == saves == SaveStrategy.STEPS:
        return float(args.save_steps / args.eval_steps).is_integer()
    return evaluates != IntervalStrategy.NO and saves in (evaluates, SaveStrategy.BEST)


def check_best_metric(args: HeadsTrainingArguments, *, num_depths: int, has_prompts: bool, is_joint: bool) -> None:
    """Checks that an evaluation has the metric `metric_for_best_model`.

    The acceptance length is the default. Where no prompt measures it and nothing reads it, the option is unset.

    Args:
        num_depths: drafting steps that are trained.

    Raises:
        ValueError: no evaluation has this metric; with the names that are allowed.
    """
    given = (args.metric_for_best_model or "loss").removeprefix("eval_")
    allowed = ["loss", *(f"top{n}_depth{k + 1}" for n in (1, 5) for k in range(num_depths))]
    allowed += ["target_loss"] * is_joint + ["acceptance_length"] * has_prompts
    if given in allowed:
        return
    if given != "acceptance_length":
        raise ValueError(f"got metric_for_best_model {given}, which nothing measures: give one of {', '.join(allowed)}")
    is_read = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
    if is_read or args.early_stopping_patience:
        raise ValueError(
            f"metric_for_best_model is {given}, but there is no prompt to measure it on: give num_eval_prompts above "
            "0 with eval_prompts or held-out conversations (features_endpoint excludes both: the target is elsewhere), "
            f"or one of {', '.join(allowed)}"
        )
    args.metric_for_best_model = None
