"""One call of `generate`, followed file by file: docs/architecture.md lists the walk, a traced call takes it."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.heads import DraftHeads
from draftsmith.inference import generate
from tests.conftest import REPOSITORY
from tests.test_architecture import ORDERS, part_of

MAX_PLACES = 8
Place = tuple[str, str]  # file, function


def documented_walk() -> list[Place]:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^\| \d+ \| `([\w/.]+)` \| `([\w.]+)` \|", page, re.M)


class Trace:
    """Profiles a call: `reached` holds the watched places in the order of their first call, `upward` every call from a
    package of `inference` into a later one."""

    def __init__(self, watched: list[Place]) -> None:
        self.watched, self.reached, self.upward = set(watched), dict[Place, None](), set[tuple[Place, Place]]()

    def __enter__(self) -> Trace:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (place := place_of(frame)) is None:
            return
        if place in self.watched:
            self.reached.setdefault(place)
        caller = frame.f_back
        while caller is not None and place_of(caller) is None:
            caller = caller.f_back
        if caller is not None:
            origin = place_of(caller)
            assert origin is not None
            if order_of(origin[0]) < order_of(place[0]):
                self.upward.add((origin, place))


@cache
def real_path(file: str) -> Path:
    return Path(file).resolve()  # src/draftsmith has links


def place_of(frame: FrameType) -> Place | None:
    """File and function of a frame in `inference` or `heads`; None elsewhere."""
    path = real_path(frame.f_code.co_filename)
    if not path.is_relative_to(REPOSITORY):
        return None
    file = str(path.relative_to(REPOSITORY))
    return (file, frame.f_code.co_qualname) if file.startswith(("inference/", "heads/")) else None


def order_of(file: str) -> int:
    """Place of a file's package in the order of imports. To the loop, heads are drafters."""
    part = "drafters" if file.startswith("heads/") else part_of(REPOSITORY / file, REPOSITORY / "inference")
    return ORDERS["inference"].index(part)


@pytest.fixture(scope="module")
def trace() -> Trace:
    model = AutoModelForCausalLM.from_pretrained(REPOSITORY / "examples" / "chat-13m", dtype="float32")
    heads = DraftHeads.from_pretrained(REPOSITORY / "examples" / "heads" / "mtp")
    with Trace(documented_walk()) as trace:
        generate(model, heads, torch.arange(5, 15)[None], max_new_tokens=8, do_sample=False)
    return trace


def test_a_call_takes_the_documented_walk(trace: Trace) -> None:
    walk = documented_walk()
    assert 5 < len(walk) <= MAX_PLACES
    assert list(trace.reached) == walk


def test_no_package_calls_back_into_a_later_one(trace: Trace) -> None:
    """One exception: a target reads properties of the nodes that it is given."""
    allowed = {("inference/targets/target.py", "inference/trees/token_tree.py")}
    assert {(origin[0], place[0]) for origin, place in trace.upward} <= allowed, trace.upward
