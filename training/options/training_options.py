"""The options of the optimization: transformers' `TrainingArguments` with our defaults, the losses, joint training.

The comment beside a default says why it differs from the default of `transformers.TrainingArguments`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import TrainingArguments

from draftsmith.training.data.options import option, refuse_without, require_positive
from draftsmith.training.distributed.launch import find_strategy, settle_devices
from draftsmith.training.losses.terms import LOSSES, parse_loss

# What transformers gets for an option that is left open, until the run has settled it.
UNSETTLED = {"logging_steps": 1, "eval_strategy": "no", "load_best_model_at_end": False}

# Weight of the heads' loss beside each target loss: section 2.2.2 of the paper, and its appendix.
_HEADS_LOSS_WEIGHTS = {"lm": 0.2, "self_distillation": 0.01}

# transformers' own options that trainers divide by, or train nothing with.
_POSITIVE = (
    *("num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("logging_steps", "save_steps", "eval_steps", "muon_learning_rate", "early_stopping_patience"),
)


@dataclass
class HeadsTrainingArguments(TrainingArguments):
    """Optimization, evaluation and checkpoints."""

    output_dir: str = option(default="outputs/heads", help="Folder for checkpoints, heads and logs.")
    # Decoder layers on a large target need a small one, MLPs do not.
    learning_rate: float | None = option(  # type: ignore[assignment, unused-ignore]
        default=None, help="Peak learning rate; none = the kind's own (Medusa and Hydra 1e-3, others 1e-4)."
    )
    # Medusa and EAGLE both decay by cosine; short runs gain the most from ending near 0.
    lr_scheduler_type: str = option(default="cosine", help="Learning rate schedule, as in transformers.")
    # Fresh projections push large gradients through the first steps. A share fits short runs too.
    warmup_steps: float = option(
        default=0.05, help="Linear warm-up: a share of all steps below 1, a number of steps from 1 on."
    )
    # The second moment of the gradients changes fast here; EAGLE trains with (0.9, 0.95) as well.
    adam_beta2: float = option(default=0.95, help="AdamW's decay of the second moment.")
    # As in EAGLE's code: the losses of all drafting steps add up in one gradient.
    max_grad_norm: float = option(default=0.5, help="Clip gradients to this norm; 0 = do not clip.")
    # Halves the memory of activations; weights, optimizer state and losses stay in float32.
    bf16: bool = option(default=True, help="Compute in bfloat16 through autocast.")
    # Steps take from milliseconds to minutes.
    logging_steps: float | None = option(  # type: ignore[assignment, unused-ignore]
        default=None, help="Steps between two log lines (below 1: share of all); none = about every half minute."
    )
    # Otherwise the accelerator waits while batches are read and padded; a CPU trains at the same time as workers.
    dataloader_num_workers: int | None = option(  # type: ignore[assignment, unused-ignore]
        default=None, help="Processes that read batches ahead; none = 2 with an accelerator, 0 on a CPU."
    )
    # A checkpoint holds the heads and two moments of each weight: two are enough to resume and to compare.
    save_total_limit: int | None = option(default=2, help="Newest checkpoints to keep; 0 = all.")
    # transformers reports to every installed backend; here nothing leaves the machine unasked.
    report_to: list[str] = option(
        default_factory=lambda: ["none"],
        help="Log also to: none, tensorboard, wandb, mlflow or trackio (each needs its package).",
    )
    # Training budgets are counted in tokens, so a record without them compares badly.
    include_num_input_tokens_seen: Literal["non_padding", "all", "no"] = option(
        default="non_padding", help="Tokens that the logs count: non_padding, all or no."
    )
    # The heads' forward takes features, not the dataset's columns: Trainer would drop all columns.
    remove_unused_columns: bool = option(default=False, help="Must stay false: features are not columns.")
    # A loss that is NaN ends the run (`run/stopping.py`); Trainer would hide it.
    logging_nan_inf_filter: bool = option(default=False, help="Leave it false: a NaN or infinite loss ends the run.")
    # Early stopping continues to count after an interruption.
    restore_callback_states_from_checkpoint: bool = option(
        default=True, help="When a run is resumed, restore the counts of early stopping."
    )
    # The acceptance length is the purpose of heads; transformers takes the loss.
    metric_for_best_model: str | None = option(
        default="acceptance_length", help="Metric of the best checkpoint: acceptance_length, loss, top1_depth1, ..."
    )
    # Loss misses what is accepted, so evaluations choose among the checkpoints (`run/evaluation.py`).
    eval_strategy: str | None = option(  # type: ignore[assignment, unused-ignore]
        default=None,
        help="When to evaluate: no, steps or epoch; none = at every checkpoint (or every --eval_steps), if "
        "conversations are held out and the metric of the best checkpoint can be measured.",
    )
    load_best_model_at_end: bool | None = option(  # type: ignore[assignment, unused-ignore]
        default=None, help="The best checkpoint is the result; none = if every checkpoint is evaluated."
    )
    early_stopping_patience: int | None = option(
        default=None, help="Stop after this many evaluations without a better --metric_for_best_model; none = never."
    )
    resume_with_changes: bool = option(
        default=False, help="Resume although data, options or processes differ from the checkpoint's (not exact)."
    )
    loss_type: str | None = option(
        default=None,
        help="Loss, or a mixture such as smooth_l1+0.1*distillation; none = the kind's own. One of: "
        f"{', '.join(LOSSES)}.",
    )
    loss_vocabulary: Literal["all", "draft"] = option(
        default="all",
        help="Tokens that the loss compares, for kinds that borrow the target's LM head: all, or draft = only those "
        "that decoders draft by default (up to twice as fast where the LM head is large; engines that draft all "
        "tokens then accept a little less).",
    )
    muon_learning_rate: float | None = option(
        default=None, help="Train hidden matrices with Muon at this rate (0.02 to 0.05 fits); none = AdamW for all."
    )
    step_decay: float | None = option(
        default=None, help="Drafting step k has weight step_decay**k in the loss; none = the kind's own value."
    )
    depth_weights: Literal["d_pace"] | None = option(
        default=None,
        help="Instead of step_decay: d_pace weighs each position by its gain in tokens; none = the kind's own (block: "
        "d_pace, unless step_decay is given).",
    )

    def __post_init__(self) -> None:
        self._check_own_options()
        settle_devices(self)
        if self.dataloader_num_workers is None:
            self.dataloader_num_workers = 2 if torch.accelerator.is_available() and not self.use_cpu else 0
        # Here None leaves a choice to the run; transformers compares numbers, and wants values.
        left_open: dict[str, Any] = {name: value for name in UNSETTLED if (value := getattr(self, name)) is None}
        if "eval_strategy" in left_open:  # on which this one depends
            left_open["load_best_model_at_end"] = self.load_best_model_at_end
        vars(self).update({name: UNSETTLED[name] for name in left_open})
        super().__post_init__()
        vars(self).update(left_open)
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # pinning serves copies to an accelerator; without one torch only warns

    @property
    def seed_of_data(self) -> int:
        """The seed of every draw from the data: its order, and held-out rows."""
        return int(self.seed if self.data_seed is None else self.data_seed)

    def _check_own_options(self) -> None:
        if self.remove_unused_columns:
            raise ValueError("got remove_unused_columns true, which drops the borders of packed rows: leave it out")
        if self.max_steps < -1 or self.max_steps == 0:
            raise ValueError(f"got max_steps {self.max_steps}: give 1 or more, or -1 for those of num_train_epochs")
        require_positive(self, _POSITIVE)
        if self.step_decay is not None and not 0 < self.step_decay <= 1:
            raise ValueError(f"got step_decay {self.step_decay}: it must be above 0 and at most 1")
        if self.loss_type is not None:
            parse_loss(self.loss_type)
        if self.depth_weights is not None and self.step_decay is not None:
            raise ValueError(
                f"got depth_weights {self.depth_weights!r} and step_decay {self.step_decay}: both set the weights of "
                "the drafting steps; leave one out"
            )
        if self.eval_strategy == "steps" and not self.eval_steps:
            raise ValueError("got eval_strategy steps without eval_steps: give the steps between two evaluations")

    def _validate_args(self) -> None:
        """On a machine without accelerators transformers refuses `bf16` without `use_cpu`, which says nothing there."""
        given = self.use_cpu
        self.use_cpu = given or not torch.accelerator.is_available()
        try:
            super()._validate_args()
        finally:
            self.use_cpu = given


@dataclass
class JointArguments:
    """Joint training of heads and target (on with --lora_r)."""

    lora_r: int | None = option(
        default=None, help="Rank of the target's LoRA adapters (Medusa-2 uses 32); none = frozen target."
    )
    lora_alpha: float = option(default=16, help="The adapters are scaled by lora_alpha / lora_r.")
    lora_dropout: float = option(default=0.0, help="Dropout on the adapters' inputs: a share below 1.")
    lora_target_modules: list[str] = option(
        default_factory=lambda: ["all-linear"],
        help="Ends of the names of adapted layers; all-linear = every linear layer but the LM head.",
    )
    target_loss: Literal["self_distillation", "lm"] = option(
        default="self_distillation",
        help="Loss that keeps the target as it is: KL to itself without adapters, or lm = next token.",
    )
    heads_loss_weight: float | None = option(
        default=None, help="Weight of the heads' loss; none = the paper's, 0.01, or 0.2 with lm."
    )
    heads_lr_multiplier: float = option(
        default=4.0, help="The heads' multiple of --learning_rate, which is the adapters' rate (paper: 4)."
    )

    def __post_init__(self) -> None:
        if self.lora_r is None:
            refuse_without(self, "lora_r", self.__dataclass_fields__.keys())
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"got lora_dropout {self.lora_dropout}: it is a share, from 0 to below 1")
        require_positive(self, ("lora_r", "lora_alpha", "heads_loss_weight", "heads_lr_multiplier"))

    @property
    def is_on(self) -> bool:
        return self.lora_r is not None

    @property
    def loss_weight(self) -> float:
        """Weight of the heads' loss."""
        return _HEADS_LOSS_WEIGHTS[self.target_loss] if self.heads_loss_weight is None else self.heads_loss_weight


def check_muon(args: HeadsTrainingArguments) -> None:
    """Refuses Muon where it cannot train.

    Raises:
        ValueError: with a torch that has no Muon, and under DeepSpeed and FSDP.
    """
    learning_rate = args.muon_learning_rate
    if learning_rate is None:
        return
    instead = "leave it out (`--muon_learning_rate none` over a file that sets it), so that AdamW trains everything"
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"got muon_learning_rate {learning_rate}, which needs torch.optim.Muon, and torch {torch.__version__} has "
            f"none: install torch 2.9 or newer, or {instead}"
        )
    if find_strategy(args) != "ddp":
        raise ValueError(
            f"got muon_learning_rate {learning_rate} under DeepSpeed or FSDP, which split matrices that Muon needs "
            f"whole: {instead}, or train with plain DDP (configs/accelerate/multi_gpu.yaml)"
        )
