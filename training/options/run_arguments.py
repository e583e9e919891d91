"""What a run does besides training: trying everything out beforehand, and reporting at its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

_Arguments = TypeVar("_Arguments")


@dataclass
class RunArguments:
    """Options of a run that change nothing of what is learned."""

    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Do not train: load everything, make a few steps on the longest rows, save and resume a checkpoint "
            "in a temporary folder, and print parameters, memory, disk, data, steps, time, and every problem. Nothing "
            "is left in --output_dir. The exit code is 1 when there is a problem."
        },
    )
    dry_run_json: str | None = field(
        default=None, metadata={"help": "With --dry_run: also write what is printed into this JSON file."}
    )

    report: bool = field(
        default=True,
        metadata={"help": "Write report.html at the end: curves, acceptance by depth, examples, data and options."},
    )

    def __post_init__(self) -> None:
        if self.dry_run_json is not None and not self.dry_run:
            raise ValueError(f"got dry_run_json {self.dry_run_json!r} without dry_run, whose result it is: give both")


def pick(more: Iterable[Any], kind: type[_Arguments]) -> _Arguments:
    """The object of this class among the arguments of a run; its defaults when there is none."""
    return next((arguments for arguments in more if isinstance(arguments, kind)), kind())
