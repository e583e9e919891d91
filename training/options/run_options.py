"""All options of a run in one object, and the options of the run as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from draftsmith.training.data.options import DataArguments, option
from draftsmith.training.features.target_options import FeatureArguments, ModelArguments, PlacementArguments
from draftsmith.training.options.joint_options import JointArguments
from draftsmith.training.options.training_options import HeadsTrainingArguments
from draftsmith.training.synthesis.on_policy import OnPolicyArguments

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str) -> float:
    """Seconds of a time such as 90m, 2h or 1.5d.

    >>> parse_seconds("90m"), parse_seconds("2h")
    (5400.0, 7200.0)

    Raises:
        ValueError: another form, or no time at all.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or not float(found[1]):
        raise ValueError(f"got time_budget {text!r}: give a number and s, m, h or d, such as 90m or 2h")
    return float(found[1]) * _UNITS[found[2]]


@dataclass
class RunArguments:
    """The run as a whole."""

    dry_run: bool = option(
        default=False, help="Try a few steps on the longest rows, print time and memory, and write nothing."
    )
    choose: bool | None = option(
        default=None,
        help="Choose every option that is not given, from the target's shape and the device's memory, and print the "
        "reasons; none = for new heads, unless a --config names their kind.",
    )
    time_budget: str | None = option(
        default=None,
        help="Train for at most this long, such as 90m, 2h or 1d: a measurement of the speed sets the number of steps. "
        "none = as long as the steps or epochs take.",
    )
    report: bool = option(default=True, help="Write report.html at the end: curves, acceptance by depth, examples.")


@dataclass(frozen=True)
class RunOptions:
    """Every option of a run; one field is one package's options."""

    model: ModelArguments
    data: DataArguments
    training: HeadsTrainingArguments
    joint: JointArguments = field(default_factory=JointArguments)
    run: RunArguments = field(default_factory=RunArguments)
    placement: PlacementArguments = field(default_factory=PlacementArguments)
    features: FeatureArguments = field(default_factory=FeatureArguments)
    on_policy: OnPolicyArguments = field(default_factory=OnPolicyArguments)

    @classmethod
    def collect(cls, parts: Iterable[Any]) -> RunOptions:
        """Puts objects of `ARGUMENT_CLASSES`, in any order, into their fields; a part that is missing has defaults."""
        found = {name: part for part in parts for name, kind in _KINDS.items() if isinstance(part, kind)}
        return cls(**found)

    def parts(self) -> tuple[Any, ...]:
        """The objects that `collect` takes."""
        return tuple(getattr(self, key.name) for key in fields(self))


_KINDS: dict[str, Any] = get_type_hints(RunOptions)
ARGUMENT_CLASSES: tuple[Any, ...] = tuple(_KINDS.values())
