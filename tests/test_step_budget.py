"""What one steady decode step runs of our code: calls, functions and files. A reader follows them all."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from draftsmith import Decoder, DraftHeads
from tests.conftest import REPOSITORY

VERIFY = "Target.verify"


@dataclass(frozen=True)
class Budget:
    calls: int
    functions: int
    files: int


@cache
def file_of(code: CodeType) -> str | None:
    """The file of a function of `inference` or `heads`, relative to the repository; None elsewhere."""
    path = Path(code.co_filename).resolve()
    if not path.is_relative_to(REPOSITORY):
        return None
    file = str(path.relative_to(REPOSITORY))
    return file if file.startswith(("inference/", "heads/")) else None


class StepProfile:
    """Counts calls by function, from one call of `Target.verify` to the next."""

    def __init__(self) -> None:
        self.steps: list[Counter[CodeType]] = [Counter()]

    def __enter__(self) -> StepProfile:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or file_of(frame.f_code) is None:
            return
        if frame.f_code.co_qualname == VERIFY:
            self.steps.append(Counter())
        self.steps[-1][frame.f_code] += 1

    def median(self) -> Budget:
        """Of the steps between the prompt's and the last one."""
        steady = self.steps[2:-1]
        assert len(steady) > 4
        return Budget(
            calls=int(statistics.median(step.total() for step in steady)),
            functions=int(statistics.median(len(step) for step in steady)),
            files=int(statistics.median(len({file_of(code) for code in step}) for step in steady)),
        )


@pytest.mark.parametrize(
    ("heads", "budget"),
    [("mtp", Budget(calls=450, functions=110, files=20)), (None, Budget(calls=165, functions=75, files=14))],
)
def test_a_step_stays_within_its_budget(heads: str | None, budget: Budget, chat_target: PreTrainedModel) -> None:
    drafter = heads and DraftHeads.from_pretrained(REPOSITORY / "examples" / "heads" / heads)
    decoder = Decoder(chat_target, drafter or None)
    arguments: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    decoder.generate(torch.arange(5, 15)[None], **arguments)  # measures costs, allocates
    with StepProfile() as profile:
        decoder.generate(torch.arange(5, 15)[None], **arguments)
    found = profile.median()
    assert found.calls <= budget.calls
    assert found.functions <= budget.functions
    assert found.files <= budget.files
