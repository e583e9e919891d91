"""The options of the data."""

import math
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from draftsmith.training.data.layouts import RecordFormat

# transformers' field for an option and its help text; mypy knows only `dataclasses.field`.
option: Any = HfArg


def find_given(options: Any, names: Collection[str] | None = None) -> list[str]:
    """Those of a dataclass's options that differ from their defaults; names: look at these only."""
    return [
        key.name
        for key in fields(options)
        if (names is None or key.name in names)
        and getattr(options, key.name) != (key.default if key.default_factory is MISSING else key.default_factory())
    ]


def refuse_without(options: Any, switch: str, names: Collection[str]) -> None:
    """Raises ValueError for options that mean nothing without `switch`, another option of the same dataclass."""
    if not getattr(options, switch) and (given := find_given(options, names)):
        raise ValueError(f"got {', '.join(given)} without {switch}: give {switch} too, or leave them out")


def require_positive(options: Any, names: Collection[str]) -> None:
    """Raises ValueError for options that are neither above 0 nor None."""
    for name in names:
        if (value := getattr(options, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"got {name} {value}: it must be above 0")


@dataclass
class DataArguments:
    """The conversations to learn from, and the prompts on which drafting is measured."""

    dataset: list[str] = option(
        help="Conversations, one or more of: JSON, JSONL, gz or Parquet files, folders of such files, hub ids "
        "(ID or ID:SUBSET), folders with a copy of a hub repository."
    )
    dataset_split: list[str] = option(
        default_factory=lambda: ["train"],
        help="Split of each hub id in --dataset: one for all, or one for each. Files have no splits.",
    )
    columns: list[str] = option(
        default_factory=list,
        help="The columns to read: messages=COLUMN, or prompt=COLUMN response=COLUMN (and context=, history=, "
        "system=, tools=); none = find them. In YAML: a mapping.",
    )
    media_folder: str | None = option(
        default=None, help="Where relative paths of images begin; none = in the folder of the file that names them."
    )
    eval_dataset: list[str] = option(
        default_factory=list,
        help="Held-out conversations, as in --dataset; none = split --validation_fraction off --dataset.",
    )
    # Not the split of --dataset: an evaluation on training rows says nothing.
    eval_split: str = option(default="validation", help="Split of each hub id in --eval_dataset. Files have no splits.")
    validation_fraction: float = option(
        default=0.02, help="Share of --dataset to hold out when there is no --eval_dataset; 0 = none."
    )
    max_length: int = option(default=2048, help="Longest training row in tokens; longer conversations are cut.")
    packing: bool = option(
        default=False,
        help="Pack several conversations, which do not see one another, into each row of up to --max_length tokens.",
    )
    max_samples: int | None = option(default=None, help="Use only the first N conversations of --dataset; none = all.")
    # The loss of every checkpoint costs most of its evaluation; the acceptance length chooses.
    max_eval_samples: int = option(default=128, help="Use the first N held-out conversations for the loss; 0 = all.")
    skip_bad_lines: bool = option(
        default=False, help="Count and skip malformed lines instead of stopping at the first one."
    )
    streaming: bool = option(
        default=False,
        help="Read and tokenize --dataset during training: for sets larger than the disk. Needs --max_steps.",
    )
    shuffle_buffer: int = option(
        default=10000, help="With --streaming: conversations in memory to draw the next one from; 1 = keep the order."
    )
    num_proc: int | None = option(
        default=None, help="Processes that tokenize the conversations; none = one for each core."
    )
    eval_prompts: str | None = option(
        default=None,
        help="Conversations, or JSON lines of {'turns': [...]}, whose first turns are decoded for the acceptance "
        "length; none = the held-out conversations.",
    )
    num_eval_prompts: int = option(
        default=16, help="Prompts to decode at each evaluation for the acceptance length; 0 = none."
    )
    eval_max_new_tokens: int = option(default=96, help="Tokens to decode for each of these prompts.")

    def __post_init__(self) -> None:
        self._check_numbers()
        self.record_format()
        self._check_sets()
        refuse_without(self, "streaming", ("shuffle_buffer",))
        refuse_without(self, "eval_dataset", ("eval_split",))
        if self.streaming and self.max_samples is not None:
            raise ValueError(f"got streaming and max_samples {self.max_samples}: limit a stream with --max_steps")

    def _check_numbers(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"got validation_fraction {self.validation_fraction}: it must be from 0 to below 1")
        require_positive(self, ("max_length", "max_samples", "num_proc", "eval_max_new_tokens", "shuffle_buffer"))
        for name, zero in (("num_eval_prompts", "do not decode"), ("max_eval_samples", "all")):
            if getattr(self, name) < 0:
                raise ValueError(f"got {name} {getattr(self, name)}: it must be at least 0 (0 = {zero})")

    def _check_sets(self) -> None:
        if len(self.dataset_split) not in (1, len(self.dataset)):
            raise ValueError(
                f"got {len(self.dataset_split)} of dataset_split for {len(self.dataset)} of dataset: give one for all, "
                "or one for each"
            )
        for name, split in zip(self.dataset, self.splits, strict=True):
            if name in self.eval_dataset and (self.eval_split == split or Path(name).exists()):  # files have no splits
                raise ValueError(
                    f"got {name} as dataset and as eval_dataset: the evaluation would read training rows; give another "
                    "eval_dataset or eval_split, or none to hold out --validation_fraction"
                )

    @property
    def splits(self) -> list[str]:
        """The split of each of `dataset`."""
        return self.dataset_split * len(self.dataset) if len(self.dataset_split) == 1 else self.dataset_split

    def record_format(self) -> RecordFormat:
        """How to read the records; raises ValueError for columns that do not make a layout."""
        return RecordFormat.parse(self.columns, self.media_folder)
