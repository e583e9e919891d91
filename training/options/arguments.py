"""Every option of training.

One field is one option; its help text states unit and meaning, and the comment beside a default of ours says why it
differs from that of `transformers.TrainingArguments`. `training.options.command_line` reads them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import TrainingArguments

from training.data.conversations import Place
from training.data.layouts import LAYOUTS, RecordFormat
from training.losses.depth_weights import parse_depth_weights
from training.losses.terms import LOSSES, parse_loss
from training.run.launching import settle_devices


@dataclass
class ModelArguments:
    """The frozen target, and the heads that are trained for it."""

    target: str = field(metadata={"help": "The target: a folder or a hub id of any stock transformers causal LM."})
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "Dtype the target is loaded in; auto = the one its weights were saved in."}
    )
    attn_implementation: str = field(
        default="sdpa", metadata={"help": "The target's attention: sdpa or eager (tree masks need one of the two)."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run Python code that comes with the target. Read that code first."}
    )
    head_type: str | None = field(
        default=None, metadata={"help": "Kind of heads to create, a key of heads.HEAD_TYPES. Not with --init_heads."}
    )
    head_overrides: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Fields of the heads' configuration as key=value with JSON values, for example "
            "--head_overrides num_heads=4 num_layers=1. A mapping in YAML. May be repeated; a key's last value wins."
        },
    )
    init_heads: str | None = field(
        default=None,
        metadata={
            "help": "Warm start, instead of --head_type: a new run from the weights, the configuration and the draft "
            "vocabulary of trained heads (folder or hub id). Optimizer, schedule and data begin anew; to go on with an "
            "interrupted run there is --resume_from_checkpoint."
        },
    )

    def __post_init__(self) -> None:
        if (self.head_type is None) == (self.init_heads is None):
            raise ValueError(
                f"got head_type={self.head_type!r} and init_heads={self.init_heads!r}: give head_type to create heads, "
                "or init_heads to continue from trained ones"
            )
        if self.init_heads is not None and self.head_overrides:
            raise ValueError(
                f"got head_overrides {self.head_overrides} with init_heads {self.init_heads!r}: trained heads bring "
                "their configuration along; leave head_overrides out"
            )
        self.parse_head_overrides()

    def parse_head_overrides(self) -> dict[str, Any]:
        """Returns `head_overrides` as the keyword arguments `heads.create_heads` takes; a value that is not JSON is a
        string."""
        overrides: dict[str, Any] = {}
        for item in self.head_overrides:
            key, equals, value = item.partition("=")
            if not (key.isidentifier() and equals):
                raise ValueError(f"got --head_overrides {item!r}: write key=value, for example num_heads=4")
            try:
                overrides[key] = json.loads(value)
            except json.JSONDecodeError:
                overrides[key] = value
        return overrides


@dataclass
class DataArguments:
    """The conversations to learn from, and the prompts on which drafting is measured."""

    dataset: list[str] = field(
        metadata={
            "help": "Conversations, one or more of: JSON, JSONL, gz or Parquet files, folders of such files, hub ids "
            "(ID or ID:SUBSET), folders with a copy of what the hub has."
        }
    )
    dataset_split: list[str] = field(
        default_factory=lambda: ["train"],
        metadata={"help": "Split to read of --dataset's hub ids: one for all, or one for each; files have none."},
    )
    dataset_format: str = field(
        default="auto",
        metadata={"help": f"Layout of the records: auto = known by their columns, or one of {', '.join(LAYOUTS)}."},
    )
    columns: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Columns that go by other names: messages=COLUMN, or prompt=COLUMN response=COLUMN (and context=, "
            "system=, tools=). A mapping in YAML."
        },
    )
    dataset_weights: list[float] = field(
        default_factory=list,
        metadata={
            "help": "How often each of --dataset is drawn from, in conversations and relative to one another, such as "
            "0.7 0.3; none = all conversations of all of them, once per epoch."
        },
    )
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = field(
        default="first_exhausted",
        metadata={
            "help": "With --dataset_weights, when an epoch ends: first_exhausted = when one set has no conversation "
            "left (of the others as many random ones were used as the weights say), all_exhausted = when every set has "
            "been used up once (the others repeat)."
        },
    )
    eval_dataset: list[str] = field(
        default_factory=list,
        metadata={"help": "Held-out conversations, as in --dataset; none = split --validation_fraction off --dataset."},
    )
    # Not that of --dataset: to evaluate on rows that are trained on says nothing.
    eval_split: str = field(
        default="validation", metadata={"help": "Split of --eval_dataset to read from a hub id; files have none."}
    )
    validation_fraction: float = field(
        default=0.02, metadata={"help": "Share of --dataset held out when there is no --eval_dataset; 0 = none."}
    )
    max_length: int = field(
        default=2048, metadata={"help": "Longest training sequence in tokens; longer conversations are cut."}
    )
    packing: bool = field(
        default=False,
        metadata={
            "help": "Fill rows of up to --max_length tokens with several conversations each, which do not see one "
            "another; batches are then of equal size."
        },
    )
    max_samples: int | None = field(
        default=None, metadata={"help": "Use the first so many conversations of --dataset; none = all."}
    )
    max_eval_samples: int = field(
        default=512, metadata={"help": "Use the first so many held-out conversations for the loss; 0 = all."}
    )
    skip_bad_lines: bool = field(
        default=False, metadata={"help": "Count and skip malformed lines instead of stopping at the first one."}
    )
    streaming: bool = field(
        default=False,
        metadata={
            "help": "Read and tokenize --dataset while training instead of storing it first: for sets larger than the "
            "disk. Needs --max_steps; epochs follow one another without end."
        },
    )
    shuffle_buffer: int = field(
        default=10000,
        metadata={"help": "With --streaming: conversations in memory that the next one is drawn from; 1 = in order."},
    )
    vocabulary_rows: int = field(
        default=10000,
        metadata={
            "help": "With --streaming: first conversations whose tokens are counted for a reduced draft vocabulary."
        },
    )
    train_on_thinking: bool = field(
        default=True,
        metadata={
            "help": "Learn the thoughts that replies begin with (reasoning_content, <think>...</think>): where the "
            "target thinks, heads draft its thoughts as well."
        },
    )
    num_proc: int = field(default=1, metadata={"help": "Processes that tokenize the conversations."})
    eval_prompts: str | None = field(
        default=None,
        metadata={
            "help": "JSON lines of prompts ({'turns': [...]}) for the acceptance length; none = the first user turns "
            "of the held-out conversations."
        },
    )
    num_eval_prompts: int = field(
        default=16, metadata={"help": "Prompts decoded at each evaluation to measure the acceptance length; 0 = none."}
    )
    eval_max_new_tokens: int = field(default=96, metadata={"help": "Tokens decoded for each of these prompts."})

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"got validation_fraction {self.validation_fraction}: it is a share, from 0 to below 1")
        positive = ("max_length", "max_samples", "num_proc", "eval_max_new_tokens", "shuffle_buffer", "vocabulary_rows")
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"got {name} {value}: it must be at least 1")
        for name, zero in (("num_eval_prompts", "do not decode"), ("max_eval_samples", "all")):
            if getattr(self, name) < 0:
                raise ValueError(f"got {name} {getattr(self, name)}: it must be at least 0 (0 = {zero})")
        if self.eval_split != DataArguments.eval_split and not self.eval_dataset:
            raise ValueError(
                f"got eval_split {self.eval_split!r} without eval_dataset, whose split it is: give both (they may name "
                "one hub id), or neither to hold out --validation_fraction"
            )
        self.record_format()
        if len(self.dataset_split) not in (1, len(self.dataset)):
            raise ValueError(
                f"got {len(self.dataset_split)} of dataset_split for {len(self.dataset)} of dataset: give one for all, "
                "or one for each"
            )
        self._check_weights()
        for name in ("shuffle_buffer", "vocabulary_rows"):
            if not self.streaming and getattr(self, name) != getattr(DataArguments, name):
                raise ValueError(
                    f"got {name} {getattr(self, name)} without streaming, the only one to read it: leave it out, or "
                    "give --streaming true"
                )
        if self.streaming and self.max_samples is not None:
            raise ValueError(f"got streaming and max_samples {self.max_samples}: --max_steps says how much is read")
        for name, split in zip(self.dataset, self.splits, strict=True):
            # Files have no splits.
            if name in self.eval_dataset and (self.eval_split == split or Place.find(name).files):
                raise ValueError(
                    f"got {name} as dataset and as eval_dataset, with the splits {split!r} and {self.eval_split!r}: "
                    "that evaluates on what is learned; give another eval_dataset (of a hub id, another "
                    "eval_split), or none to hold out --validation_fraction"
                )

    @property
    def splits(self) -> list[str]:
        """The split of each of `dataset`."""
        return self.dataset_split * len(self.dataset) if len(self.dataset_split) == 1 else self.dataset_split

    def record_format(self) -> RecordFormat:
        """How records are to be read.

        Raises:
            ValueError: an unknown layout, or columns that make none.
        """
        return RecordFormat.parse(self.dataset_format, self.columns)

    def _check_weights(self) -> None:
        if self.dataset_weights and len(self.dataset_weights) != len(self.dataset):
            raise ValueError(
                f"got {len(self.dataset_weights)} dataset_weights for {len(self.dataset)} of dataset: give one for each"
            )
        if any(not 0 < weight < float("inf") for weight in self.dataset_weights):
            raise ValueError(
                f"got dataset_weights {self.dataset_weights}: each must be above 0; leave out what is not used"
            )
        if self.stopping_strategy != DataArguments.stopping_strategy and not self.dataset_weights:
            raise ValueError(
                f"got stopping_strategy {self.stopping_strategy!r} without dataset_weights: all conversations are used "
                "then, once per epoch; leave it out"
            )


@dataclass
class HeadsTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with defaults for small heads on a frozen target, and the loss's options."""

    output_dir: str = field(default="outputs/heads", metadata={"help": "Folder for checkpoints, heads and logs."})
    # A decoder layer above a large target: EAGLE-3's code uses 5e-5, others 1e-4. Medusa's paper uses 1e-3 for its MLPs
    # (arXiv 2401.10774, appendix), so the files in configs/train set it for each kind.
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    # Medusa and EAGLE both decay by cosine; short runs gain the most from ending near 0.
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule, as in transformers."})
    # Fresh projections push large gradients through the first steps. A share, so that it fits short runs as well.
    warmup_steps: float = field(
        default=0.05, metadata={"help": "Linear warm-up: a share of all steps below 1, a number of steps from 1 on."}
    )
    # The second moment of the gradients changes fast here; EAGLE trains with (0.9, 0.95) as well.
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's decay of the second moment."})
    # As in EAGLE's code: the losses of all drafting steps add up in one gradient.
    max_grad_norm: float = field(default=0.5, metadata={"help": "Gradients are clipped to this norm; 0 = not clipped."})
    # Halves the memory of activations; weights, optimizer state and losses stay in float32.
    bf16: bool = field(default=True, metadata={"help": "Compute in bfloat16 through autocast."})
    logging_steps: float = field(default=20, metadata={"help": "Steps between two log lines (below 1: share of all)."})
    # A checkpoint holds the heads and two moments of each weight: a few are enough to resume and to compare.
    save_total_limit: int | None = field(default=2, metadata={"help": "Newest checkpoints to keep; 0 = all."})
    # transformers reports to whatever is installed; here nothing leaves the machine unless it is asked for.
    report_to: list[str] = field(
        default_factory=lambda: ["none"],
        metadata={"help": "Where to log besides the terminal: none, tensorboard, wandb (needs that extra), ..."},
    )
    # Training budgets are counted in tokens, so a record without them compares badly.
    include_num_input_tokens_seen: Literal["non_padding", "all", "no"] = field(
        default="non_padding", metadata={"help": "Which tokens the logs count: non_padding, all or no."}
    )
    # The heads' forward takes features, not the dataset's columns: Trainer would drop them all.
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay false: features are not columns."})
    # Otherwise Trainer gathers logits of [batch, tokens, vocabulary] over the whole evaluation set.
    prediction_loss_only: bool = field(default=True, metadata={"help": "Must stay true: logits are never gathered."})
    # A loss that is NaN ends the run (`run/stopping.py`); Trainer would hide it, and wait for every batch to do so.
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Leave it false: a loss that is NaN or infinite ends the run."}
    )
    # What early stopping has counted goes on after an interruption.
    restore_callback_states_from_checkpoint: bool = field(
        default=True,
        metadata={"help": "When a run is resumed, restore what callbacks counted (early stopping)."},
    )
    # What heads are for; transformers takes the loss.
    metric_for_best_model: str | None = field(
        default="acceptance_length",
        metadata={
            "help": "Metric of the evaluations that decides which checkpoint is the best: acceptance_length, loss, "
            "top1_depth1, .... The best one is kept besides the newest; --load_best_model_at_end true makes it the "
            "result."
        },
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Stop after so many evaluations in a row without a better --metric_for_best_model; none = never."
        },
    )
    resume_with_changes: bool = field(
        default=False,
        metadata={
            "help": "Let --resume_from_checkpoint go on although data, options or the number of processes differ from "
            "the checkpoint's; what differs is logged, and the result is not the uninterrupted run's."
        },
    )
    loss_type: str | None = field(
        default=None,
        metadata={
            "help": "What to learn, a loss or a mixture such as smooth_l1+0.1*distillation, of: "
            f"{', '.join(LOSSES)} (docs/training.md); none = the kind's own choice."
        },
    )
    muon_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Train the hidden matrices with Muon (torch 2.9 or newer) at this peak learning rate (0.02 to 0.05 "
            "fits), and only LM heads, norms and biases with AdamW at --learning_rate; none = AdamW for all."
        },
    )
    step_decay: float | None = field(
        default=None,
        metadata={"help": "Drafting step k weighs step_decay**k in the loss; none = the kind's own value."},
    )
    depth_weights: str | None = field(
        default=None,
        metadata={
            "help": "Weights of the drafting steps instead of --step_decay: d_pace (each position's own, by how likely "
            "its draft lives that long), or one number for each step, such as 1,0.8,0.5."
        },
    )

    def __post_init__(self) -> None:
        for name, needed in (("remove_unused_columns", False), ("prediction_loss_only", True)):
            if getattr(self, name) is not needed:
                raise ValueError(f"got {name} {getattr(self, name)}: heads train with {needed} only; leave it out")
        if self.step_decay is not None and not 0 < self.step_decay <= 1:
            raise ValueError(f"got step_decay {self.step_decay}: it must be above 0 and at most 1")
        if self.loss_type is not None:
            parse_loss(self.loss_type)
        if parse_depth_weights(self.depth_weights) is not None and self.step_decay is not None:
            raise ValueError(
                f"got depth_weights {self.depth_weights!r} and step_decay {self.step_decay}: one takes the other's "
                "place; leave one out"
            )
        if self.muon_learning_rate is not None and self.muon_learning_rate <= 0:
            raise ValueError(f"got muon_learning_rate {self.muon_learning_rate}: it must be above 0")
        if self.early_stopping_patience is not None:
            if self.early_stopping_patience < 1:
                raise ValueError(f"got early_stopping_patience {self.early_stopping_patience}: it must be at least 1")
            if str(getattr(self.eval_strategy, "value", self.eval_strategy)) == "no":
                raise ValueError(
                    f"got early_stopping_patience {self.early_stopping_patience} without evaluations: give "
                    "eval_strategy (steps or epoch) as well"
                )
        settle_devices(self)
        super().__post_init__()
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # pinning serves copies to an accelerator; without one torch only warns

    def _validate_args(self) -> None:
        """On a machine with CPUs alone transformers refuses `bf16` without `use_cpu`, which says nothing there."""
        asked = self.use_cpu
        self.use_cpu = asked or not torch.accelerator.is_available()
        try:
            super()._validate_args()
        finally:
            self.use_cpu = asked


BY_METRIC = ("reduce_lr_on_plateau", "greedy")


def goes_by_metric(args: TrainingArguments) -> bool:
    """Whether the learning rate depends on what evaluations find, not on the step."""
    return getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type) in BY_METRIC


def seed_of_data(args: TrainingArguments) -> int:
    """Of what is drawn from the data: its order, mixtures, what is held out, which replies are written anew."""
    return int(args.seed if args.data_seed is None else args.data_seed)
