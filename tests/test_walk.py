"""Decoding, followed call by call: `generate` takes the walk that docs/architecture.md lists, and what one steady step
runs of our code stays within a budget: a reader follows it all."""

from __future__ import annotations

import re
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

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder
from tests.conftest import REPOSITORY

MAX_PLACES = 8
PROMPT = torch.arange(5, 15)[None]
Place = tuple[str, str]  # file, function


@dataclass(frozen=True)
class Budget:
    calls: int
    functions: int
    files: int


@cache
def place_of(code: CodeType) -> Place | None:
    """File and function of code of `inference` or `heads`; None elsewhere."""
    path = Path(code.co_filename).resolve()  # src/draftsmith has links
    if not path.is_relative_to(REPOSITORY):
        return None
    file = str(path.relative_to(REPOSITORY))
    return (file, code.co_qualname) if file.startswith(("inference/", "heads/")) else None


class Trace:
    """Counts the calls of each place, from one call of `Target.verify` to the next."""

    def __init__(self) -> None:
        self.steps: list[Counter[Place]] = [Counter()]

    def __enter__(self) -> Trace:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (place := place_of(frame.f_code)) is None:
            return
        if place[1] == "Target.verify":
            self.steps.append(Counter())
        self.steps[-1][place] += 1

    def median(self) -> Budget:
        """Of the steps between the prompt's and the last one."""
        steady = self.steps[2:-1]
        assert len(steady) > 4
        return Budget(
            calls=int(statistics.median(step.total() for step in steady)),
            functions=int(statistics.median(len(step) for step in steady)),
            files=int(statistics.median(len({file for file, _ in step}) for step in steady)),
        )


def decoder_of(model: PreTrainedModel, heads: str | None) -> Decoder:
    return Decoder(model, heads and DraftHeads.from_pretrained(REPOSITORY / "examples" / "heads" / heads))


def test_a_call_takes_the_documented_walk(chat_target: PreTrainedModel) -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk: list[Place] = re.findall(r"^\| \d+ \| `([\w/.]+)` \| `([\w.]+)` \|", page, re.M)
    assert 5 < len(walk) <= MAX_PLACES
    decoder = decoder_of(chat_target, "mtp")
    with Trace() as trace:
        decoder.generate(PROMPT, max_new_tokens=8, do_sample=False)
    reached = dict.fromkeys(place for step in trace.steps for place in step)  # in the order of first calls
    assert [place for place in reached if place in walk] == walk


@pytest.mark.parametrize(
    ("heads", "budget"),
    [("mtp", Budget(calls=450, functions=110, files=20)), (None, Budget(calls=165, functions=75, files=14))],
)
def test_a_step_stays_within_its_budget(heads: str | None, budget: Budget, chat_target: PreTrainedModel) -> None:
    decoder = decoder_of(chat_target, heads)
    decoder.generate(PROMPT, max_new_tokens=40, do_sample=False)  # measures costs, allocates
    with Trace() as trace:
        decoder.generate(PROMPT, max_new_tokens=40, do_sample=False)
    found = trace.median()
    assert found.calls <= budget.calls
    assert found.functions <= budget.functions
    assert found.files <= budget.files
