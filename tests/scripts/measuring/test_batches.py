"""Batch sizes as an axis of benchmark.py: how batches are made, and what their numbers say."""

import pytest
import torch
from transformers import PreTrainedModel

from draftsmith.inference import Target
from draftsmith.scripts.measuring.measure import PLAIN, TRANSFORMERS, Contender, Prompt, Run, Settings, make_batches
from draftsmith.scripts.measuring.report import make_rows
from tests.scripts.test_benchmark import stats_of


def test_batches_are_full_and_left_padded() -> None:
    prompts = [Prompt(f"p{n}", n, torch.arange(1, n + 2)[None]) for n in range(3)]
    first, last = make_batches(prompts, 2)
    assert first.input_ids.tolist() == [[0, 1], [1, 2]]
    assert first.attention_mask.tolist() == [[0, 1], [1, 1]]
    assert [prompt.id for prompt in last.prompts] == ["p2", "p0"]
    (every,) = make_batches(prompts, 7)
    assert [prompt.index for prompt in every.prompts] == [0, 1, 2, 0, 1, 2, 0]


# What the numbers say.


def test_rows_of_a_batch_by_hand(chat_target: PreTrainedModel) -> None:
    """Two prompts together, of 4 and 2 new tokens: the second row leaves before the last pass."""
    texts = [[5, 6, 7, 8], [5, 6]]
    spent = {"prefill": 1.0, "draft": 0.2, "verify": 0.6, "total": 2.0}
    runs = {
        TRANSFORMERS: Run(texts, 2.0, 6),
        PLAIN: Run(texts, 3.0, 4, stats_of([0, 0, 0, 0], num_passes=3, prefill=1.0, verify=1.2, total=2.5)),
        "mine": Run([[5, 6, 7, 8], [5, 9]], 1.0, 3, stats_of([0, 1, 0], num_passes=2, **spent)),
    }
    contenders = [Contender(name, runs=[[run]], profiled=[run]) for name, run in runs.items()]
    prompts = [Prompt(f"p{n}", n, torch.tensor([[1, 50 + n]])) for n in range(2)]
    settings, target = Settings(batch_size=2), Target(chat_target)
    generate, plain, mine = make_rows(contenders, prompts, settings, target, {TRANSFORMERS: texts})
    assert (generate.tokens_per_second, mine.tokens_per_second, mine.over_transformers) == (3.0, 6.0, 2.0)
    assert (generate.acceptance_length, mine.acceptance_length) == (1.0, pytest.approx(4 / 3))
    assert (plain.rows_per_step, mine.rows_per_step) == (pytest.approx(4 / 3), 1.5)
    assert (mine.nodes_per_step, mine.host_syncs_per_step) == (4.0, 1.0)
    # A pass of the whole batch: 1 s for two of them; plain decoding's three take 1.5 s.
    assert (mine.step_milliseconds["step"], mine.step_milliseconds["verify"]) == (500.0, 300.0)
    assert (generate.reference, generate.num_identical) == (f"{TRANSFORMERS}, batch 1", 2)
    assert (mine.num_identical, mine.num_compared) == (1, 2)
    assert [(name, one.place) for name, one in mine.differences] == [("p1", 1)]
