"""Training heads of a kind that is not of this repository: examples/own_kind.py."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from draftsmith.heads import HEAD_TYPES
from tests.conftest import REPOSITORY
from tests.training.runner import Runner


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    monkeypatch.delitem(sys.modules, "own_kind", raising=False)
    import own_kind

    yield own_kind
    HEAD_TYPES.pop("bigram", None)


def test_it_trains_and_is_evaluated(example: Any, train: Runner) -> None:
    found = train(head_type="bigram", head_overrides=["rank=16"], learning_rate=0.05, max_steps=40)
    assert found["eval_loss"] < math.log(60), "better than no idea"
    assert found["eval_acceptance_length"] >= 1.0


def test_what_it_says_of_its_steps_must_hold(example: Any, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example.BigramHeads, "num_unrolled_steps", 2)
    with pytest.raises(ValueError, match=r"shifts \[2\], and \[2, 3\].*num_unrolled_steps"):
        train(head_type="bigram", head_overrides=["rank=16"])
    monkeypatch.delattr(example.BigramHeads, "num_unrolled_steps")
    with pytest.raises(TypeError, match=r"BigramHeads.*num_unrolled_steps"):
        train(head_type="bigram", head_overrides=["rank=16"])
