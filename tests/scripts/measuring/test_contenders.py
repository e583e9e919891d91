"""How a contender's time is split."""

from __future__ import annotations

import itertools

import pytest

from draftsmith.heads import create_heads
from draftsmith.inference import Target
from draftsmith.scripts.measuring.contenders import OurDecoding
from draftsmith.scripts.measuring.measure import Batch, Prompt, Settings
from tests.tiny_targets import random_prompt, tiny_target


def test_reading_the_prompt_is_not_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of this tree calls the drafter twice, and each call takes one second of this clock."""
    target = Target(tiny_target("llama"))
    decode = OurDecoding(target, create_heads("eagle3", target).eval(), tree="dynamic:2,2,4")
    clock = itertools.count()
    assert decode.timed is not None
    monkeypatch.setattr(decode.timed, "_now", lambda: float(next(clock)))
    for length in (3, 100):
        prompt = Batch.of(Prompt("", 0, random_prompt(length)))
        run = decode(prompt, Settings(), max_new_tokens=12)
        assert run.stats is not None
        assert run.draft_forward_seconds == 2 * run.stats.num_verify_steps
