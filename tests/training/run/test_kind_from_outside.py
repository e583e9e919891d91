"""Training heads of a kind that is not of this repository: examples/own_kind.py."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.training.runner import Runner


def test_it_trains_and_is_evaluated(own_kind: Any, train: Runner) -> None:
    found = train(head_type="bigram", head_overrides=["rank=16"], learning_rate=0.05, max_steps=40)
    assert found["eval_loss"] < math.log(60), "better than no idea"
    assert found["eval_acceptance_length"] >= 1.0


def test_what_it_says_of_its_steps_must_hold(own_kind: Any, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_kind.BigramHeads, "num_unrolled_steps", 2)
    with pytest.raises(ValueError, match=r"shifts \[2\], and \[2, 3\].*num_unrolled_steps"):
        train(head_type="bigram", head_overrides=["rank=16"])
    monkeypatch.delattr(own_kind.BigramHeads, "num_unrolled_steps")
    with pytest.raises(TypeError, match=r"BigramHeads.*num_unrolled_steps"):
        train(head_type="bigram", head_overrides=["rank=16"])
