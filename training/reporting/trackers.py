"""Sends the examples of a finished run to wandb; transformers sends the metrics of `report_to`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.training.reporting.examples import Example


def send_examples(examples: Sequence[Example], report_to: Any) -> None:
    """Adds a table of prompts, replies and acceptance lengths to the wandb run, if there is one."""
    if "wandb" not in report_to:
        return
    import wandb

    rows = [
        [example.prompt, "".join(piece.text for piece in example.pieces), example.acceptance_length]
        for example in examples
    ]
    if wandb.run is not None:
        wandb.log({"examples": wandb.Table(columns=["prompt", "reply", "acceptance length"], data=rows)})
