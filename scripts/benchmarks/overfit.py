"""Learns one conversation by heart with every kind of heads: what a correct kind must be able to do.

    python scripts/benchmarks/overfit.py

The target writes the reply greedily, heads are trained on it until their chains are accepted whole, and a table says
how far they came. A kind that stays below --share of its longest chain makes the exit code 1.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from transformers import HfArgumentParser, PrinterCallback, TrainerCallback, set_seed

from heads import HEAD_TYPES, create_heads
from inference import Decoder, Target, chain, generate
from scripts.model_loading import encode_messages, load_target
from training.data.collation import ConversationCollator
from training.features.sources import OnlineFeatures, TargetStates
from training.options.arguments import HeadsTrainingArguments
from training.run.trainer import HeadsTrainer

DEPTH_OF_ANY = 4  # of kinds that draft as deep as they are asked to


@dataclass
class OverfitArguments:
    target: str = field(default="examples/chat-13m", metadata={"help": "The target: a folder or a hub id."})
    prompt: str = field(
        default="How do I keep my plants alive in winter?", metadata={"help": "What the target answers, greedily."}
    )
    kinds: list[str] = field(
        default_factory=lambda: sorted(HEAD_TYPES), metadata={"help": "Kinds of heads, of heads.HEAD_TYPES."}
    )
    num_tokens: int = field(default=96, metadata={"help": "Tokens of the reply that are decoded."})
    max_steps: int = field(default=400, metadata={"help": "Optimizer steps after which a kind is given up."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Of AdamW, constant."})
    share: float = field(default=0.9, metadata={"help": "Of the longest chain's acceptance length; enough to pass."})
    seed: int = field(default=0, metadata={"help": "Seeds the heads' first weights."})

    def __post_init__(self) -> None:
        if unknown := set(self.kinds) - HEAD_TYPES.keys():
            raise ValueError(f"got --kinds {' '.join(sorted(unknown))}; known kinds: {', '.join(sorted(HEAD_TYPES))}")
        for name in ("num_tokens", "max_steps", "learning_rate"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"got --{name} {value}: give more than 0")
        if not 0 < self.share <= 1:
            raise ValueError(f"got --share {self.share}: give more than 0 and at most 1")


@dataclass
class Result:
    """How far a kind came: an acceptance length (tokens a step, the bonus token included) of at most `longest`."""

    kind: str
    steps: int
    acceptance_length: float
    longest: int


class StopWhenKnown(TrainerCallback):
    """Ends the training at the first evaluation with `goal` tokens accepted at each step."""

    def __init__(self, goal: float) -> None:
        self.goal = goal

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        control.should_training_stop |= metrics["eval_acceptance_length"] >= self.goal


class OneBatch:
    """The target's states of the one batch there is."""

    def __init__(self, source: OnlineFeatures) -> None:
        self.source = source
        self.states: TargetStates | None = None

    def __call__(self, batch: Mapping[str, Tensor]) -> TargetStates:
        self.states = self.states or self.source(batch)
        return self.states


def main(argv: Sequence[str] | None = None) -> int:
    try:
        (args,) = HfArgumentParser(OverfitArguments).parse_args_into_dataclasses(args=argv)
    except ValueError as error:
        sys.exit(f"overfit.py: {error}")
    try:
        target, tokenizer = load_target(args.target, dtype="float32")
    except (ValueError, OSError) as error:
        sys.exit(f"overfit.py: {args.target}: {error}")
    prompt = encode_messages(tokenizer, [{"role": "user", "content": args.prompt}]).to(target.device)
    # Longer than what is decoded, so that the last steps draft as well.
    text = generate(target, None, prompt, max_new_tokens=args.num_tokens + 16, do_sample=False).sequences
    print(f"{'kind':10} {'steps':>5} {'acceptance length':>18} at most")
    results = []
    for kind in args.kinds:
        result = overfit(kind, target, text, prompt.shape[1], args)
        print(f"{kind:10} {result.steps:5} {result.acceptance_length:18.2f} {result.longest:7}", flush=True)
        results.append(result)
    poor = [result.kind for result in results if result.acceptance_length < args.share * result.longest]
    if poor:
        print(f"below {args.share:.0%} of the most that is possible: {', '.join(poor)}", file=sys.stderr)
    return 1 if poor else 0


def overfit(kind: str, target: Target, text: Tensor, prompt_length: int, args: OverfitArguments) -> Result:
    """Trains fresh heads on one text [1, T] until chains over its reply are accepted as far as that is possible."""
    set_seed(args.seed)
    heads = create_heads(kind, target)
    depth = heads.max_depth or DEPTH_OF_ANY
    num_learned = text.shape[1] - prompt_length
    num_new = min(args.num_tokens, num_learned)
    prompt, expected = text[:, :prompt_length], text[:, : prompt_length + num_new]

    def measure() -> dict[str, float]:
        decoder = Decoder(target, heads, tree=chain(depth))
        output = decoder.generate(prompt, torch.ones_like(prompt), max_new_tokens=num_new, do_sample=False)
        assert torch.equal(output.sequences, expected), "not the target's own text"
        return {"acceptance_length": output.stats.acceptance_length}

    row = {"input_ids": text[0].tolist(), "loss_mask": [0] * prompt_length + [1] * num_learned}
    with tempfile.TemporaryDirectory() as folder:
        trainer = HeadsTrainer(
            target=target,
            features=OneBatch(OnlineFeatures(target, heads.feature_layers)),
            loss_type=heads.default_loss,
            step_decay=heads.default_step_decay,
            measure_acceptance=measure,
            model=heads,
            args=HeadsTrainingArguments(
                output_dir=folder,
                max_steps=args.max_steps,
                learning_rate=args.learning_rate,
                lr_scheduler_type="constant",
                per_device_train_batch_size=1,
                eval_strategy="steps",
                eval_steps=20,
                save_strategy="no",
                logging_strategy="no",
                bf16=False,
                disable_tqdm=True,
                seed=args.seed,
            ),
            train_dataset=[row],
            eval_dataset=[row],
            data_collator=ConversationCollator(0),
            callbacks=[StopWhenKnown(0.99 * (depth + 1))],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return Result(kind, trainer.state.global_step, measure()["acceptance_length"], depth + 1)


if __name__ == "__main__":
    sys.exit(main())
