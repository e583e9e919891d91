"""Every option of training.

One field is one option; its help text states unit and meaning, and the comment beside a default of ours says why it
differs from that of `transformers.TrainingArguments`. `training.options.command_line` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import TrainingArguments

from training.losses.depth_weights import parse_depth_weights
from training.losses.terms import LOSSES, parse_loss
from training.run.launching import settle_devices


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
