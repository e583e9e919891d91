"""Every option of training, and how a YAML file and the command line become them.

`parse_arguments` reads `--config FILE.yaml` and then the command line, whose values win. A key that no dataclass below
knows is an error that names the nearest one. One field is one option; its help text states unit and meaning, and the
comment beside a default of ours says why it differs from that of `transformers.TrainingArguments`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments


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
        default=None, metadata={"help": "Trained heads (folder or hub id) to continue from, instead of --head_type."}
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
        metadata={"help": "Conversations (ShareGPT or `messages`): JSON, JSONL or gz files, or hub ids; one or more."}
    )
    dataset_split: str = field(
        default="train", metadata={"help": "Split of --dataset to read from a hub id; files have none."}
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
    max_samples: int | None = field(
        default=None, metadata={"help": "Use the first so many conversations of --dataset; none = all."}
    )
    max_eval_samples: int = field(
        default=512, metadata={"help": "Use the first so many held-out conversations for the loss; 0 = all."}
    )
    skip_bad_lines: bool = field(
        default=False, metadata={"help": "Count and skip malformed lines instead of stopping at the first one."}
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
        positive = ("max_length", "max_samples", "num_proc", "eval_max_new_tokens")
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
        for name in self.eval_dataset:
            # Files have no splits.
            if name in self.dataset and (self.eval_split == self.dataset_split or Path(name).exists()):
                raise ValueError(
                    f"got {name} as dataset and as eval_dataset, with the splits {self.dataset_split!r} and "
                    f"{self.eval_split!r}: that evaluates on what is learned; give another eval_dataset (of a hub id, "
                    "another eval_split), or none to hold out --validation_fraction"
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
    loss_type: Literal["cross_entropy", "distillation", "topk_distillation", "total_variation"] | None = field(
        default=None,
        metadata={
            "help": "What to learn: the data's tokens, the target's distribution, that with its best tokens counted "
            "twice (HASS), or (total_variation) mostly that little of the draft's is rejected; none = the kind's own "
            "choice."
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

    def __post_init__(self) -> None:
        for name, needed in (("remove_unused_columns", False), ("prediction_loss_only", True)):
            if getattr(self, name) is not needed:
                raise ValueError(f"got {name} {getattr(self, name)}: heads train with {needed} only; leave it out")
        if self.step_decay is not None and not 0 < self.step_decay <= 1:
            raise ValueError(f"got step_decay {self.step_decay}: it must be above 0 and at most 1")
        if self.muon_learning_rate is not None and self.muon_learning_rate <= 0:
            raise ValueError(f"got muon_learning_rate {self.muon_learning_rate}: it must be above 0")
        is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if is_distributed and self.ddp_backend is None and (self.use_cpu or not torch.accelerator.is_available()):
            self.ddp_backend = "gloo"  # under DeepSpeed, no backend leaves each process alone with all of the data
        super().__post_init__()
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # pinning serves copies to an accelerator; without one torch only warns


class _StockArguments(TrainingArguments):
    """transformers' defaults, to compare with. It sets up no device, which would reset accelerate's state for all."""

    _n_gpu = 0

    @property
    def _setup_devices(self) -> torch.device:
        return torch.device("cpu")


ARGUMENT_CLASSES: tuple[Any, ...] = (ModelArguments, DataArguments, HeadsTrainingArguments)
_Arguments = TypeVar("_Arguments", ModelArguments, DataArguments, HeadsTrainingArguments)


class _Parser(HfArgumentParser):  # type: ignore[misc, unused-ignore]
    """Raises instead of printing a hundred lines of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (all options: --help)")


def parse_arguments(
    argv: Sequence[str] | None = None,
) -> tuple[ModelArguments, DataArguments, HeadsTrainingArguments]:
    """Reads `[--config FILE.yaml] [--any_key value ...]`; what the command line says wins over the file.

    Paths in the file are relative to the current folder, like those on the command line.

    Args:
        argv: the arguments without the program's name; None = `sys.argv[1:]`.

    Raises:
        ValueError: unknown key (naming the nearest known one), missing or malformed value, unreadable file.
        SystemExit: after `--help`.
    """
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", metavar="FILE.yaml", help="YAML file with any of the options below.")
    parser = _Parser(ARGUMENT_CLASSES, allow_abbrev=False, parents=[first])
    # Taken out of the parser's hands: argparse would keep the last `--head_overrides` only, and none of the file's.
    first.add_argument("--head_overrides", "--head-overrides", nargs="+", action="extend", default=[])
    known, rest = first.parse_known_args(list(sys.argv[1:] if argv is None else argv))
    for word in rest:
        flag = word.partition("=")[0].replace("-", "_")
        if flag.startswith("__") and flag != "__help":
            _refuse_unknown_key(flag.removeprefix("__").removeprefix("no_"), "on the command line")

    settings = _read_config(Path(known.config)) if known.config else {}
    overrides = [*_key_values(settings.pop("head_overrides", None)), *known.head_overrides]
    if overrides:
        rest = [*rest, "--head_overrides", *overrides]
    namespace, unexpected = parser.parse_known_args([*_command_line(settings), *rest])
    if unexpected:
        raise ValueError(f"unexpected value {unexpected[0]!r}: options are --key value (all options: --help)")
    values = vars(namespace)

    def build(kind: type[_Arguments]) -> _Arguments:
        return kind(**{key.name: values[key.name] for key in dataclasses.fields(kind) if key.init})

    return build(ModelArguments), build(DataArguments), build(HeadsTrainingArguments)


def resolve_arguments(model: ModelArguments, data: DataArguments, training: HeadsTrainingArguments) -> dict[str, Any]:
    """Returns the options as one flat mapping that, written as YAML, `--config` reads back to the same run.

    Of `TrainingArguments` it holds the fields named in this file and those that differ from transformers' defaults;
    secrets are left out, and so are what the machine decided and how an interrupted run was taken up again.
    """
    settings = {**dataclasses.asdict(model), "head_overrides": model.parse_head_overrides(), **dataclasses.asdict(data)}
    stock = _StockArguments(output_dir=training.output_dir).to_dict()
    ours = set(HeadsTrainingArguments.__annotations__)
    left_out = {key for key in _known_keys() if key.endswith("_token")}
    left_out |= {"dataloader_pin_memory", "ddp_backend", "local_rank", "resume_from_checkpoint"}
    for key, value in training.to_dict().items():
        is_ours_or_changed = key in ours or value != stock.get(key)
        if is_ours_or_changed and key in _known_keys() and key not in left_out:
            settings[key] = value
    settings["report_to"] = settings["report_to"] or ["none"]
    return {key: value for key, value in settings.items() if value not in (None, [], {})}


def _known_keys() -> dict[str, Any]:
    """Name -> field of every option."""
    return {key.name: key for kind in ARGUMENT_CLASSES for key in dataclasses.fields(kind) if key.init}


def _refuse_unknown_key(key: str, where: str) -> None:
    known = _known_keys()
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown key {key!r} {where}; did you mean {near!r}? (all options: --help)")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"got --config {path}: cannot read it ({error.strerror}); configs/train has examples"
        ) from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds {type(settings).__name__}: write one `key: value` per line")
    for key in settings:
        _refuse_unknown_key(str(key), f"in {path}")
    return settings


def _key_values(mapping: Any) -> list[str]:
    """{"num_heads": 4} -> ["num_heads=4"]. YAML reads 1e-3 as a string, so strings pass as they are."""
    if mapping is None:
        return []
    if not isinstance(mapping, dict):
        raise ValueError(f"got head_overrides {mapping!r}: in YAML it is a mapping, for example {{num_heads: 4}}")
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in mapping.items()]


def _command_line(settings: dict[str, Any]) -> Iterator[str]:
    """The arguments that say the same as a YAML file, so that both go through the same checks and conversions."""
    for key, value in settings.items():
        if value is None:
            if _known_keys()[key].default is not None:
                raise ValueError(f"got {key}: null, which is no value of it; leave the line out for the default")
            continue
        if isinstance(value, list):
            if value:
                yield from (f"--{key}", *map(str, value))
        elif isinstance(value, dict):
            yield f"--{key}={json.dumps(value)}"
        else:
            yield f"--{key}={value}"
