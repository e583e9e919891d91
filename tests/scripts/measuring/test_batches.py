"""Batch sizes as an axis of benchmark.py: how batches are made, what their numbers say, and the tables over them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from draftsmith.inference import NgramDrafter, Target
from draftsmith.scripts.measuring.batches import MARK, choose_trees, make_batch_grid
from draftsmith.scripts.measuring.contenders import TimedDrafter
from draftsmith.scripts.measuring.measure import PLAIN, TRANSFORMERS, Contender, Prompt, Run, Settings, make_batches
from draftsmith.scripts.measuring.report import make_rows, set_rooflines
from draftsmith.scripts.measuring.roofline import Hardware, Work
from draftsmith.scripts.measuring.table import Row
from tests.scripts.test_benchmark import stats_of


def test_batches_are_full_and_left_padded() -> None:
    prompts = [Prompt(f"p{n}", n, torch.arange(1, n + 2)[None]) for n in range(3)]
    first, last = make_batches(prompts, 2)
    assert first.input_ids.tolist() == [[0, 1], [1, 2]]
    assert first.attention_mask.tolist() == [[0, 1], [1, 1]]
    assert ([prompt.id for prompt in last.prompts], last.index) == (["p2", "p0"], 1)
    (every,) = make_batches(prompts, 7)
    assert [prompt.index for prompt in every.prompts] == [0, 1, 2, 0, 1, 2, 0]


def test_rows_leave_the_batch_of_a_timed_drafter() -> None:
    device = torch.device("cpu")
    assert TimedDrafter(NgramDrafter(), device).can_copy_rows
    without: Any = SimpleNamespace(
        feature_layers=(),
        max_depth=None,
        drafts_chains_only=False,
        shares_target_cache=False,
        can_copy_rows=False,
        reads_first_token=False,
    )
    assert not TimedDrafter(without, device).can_copy_rows


# What the numbers say.


def test_rows_of_a_batch_by_hand(chat_target: PreTrainedModel) -> None:
    """Two prompts together, of 4 and 2 new tokens: the second row leaves before the last pass."""
    texts = [[5, 6, 7, 8], [5, 6]]
    spent = {"prefill": 1.0, "draft": 0.2, "verify": 0.6, "total": 2.0}
    runs = {
        TRANSFORMERS: Run(texts, 2.0, 6),
        PLAIN: Run(texts, 3.0, 4, stats_of([0, 0, 0, 0], num_passes=3, prefill=1.0, verify=1.2, total=2.5)),
        "mine": Run(
            [[5, 6, 7, 8], [5, 9]], 1.0, 3, stats_of([0, 1, 0], num_passes=2, **spent), draft_forward_seconds=0.2
        ),
    }
    contenders = [Contender(name, runs=[[run]], profiled=[run]) for name, run in runs.items()]
    contenders[2].work = Work(weight_bytes=1e6, flops=1e9)
    prompts = [Prompt(f"p{n}", n, torch.tensor([[1, 50 + n]])) for n in range(2)]
    settings, target = Settings(batch_size=2), Target(chat_target)
    generate, plain, mine = make_rows(contenders, prompts, settings, target, single_texts=texts)
    assert (generate.tokens_per_second, mine.tokens_per_second, mine.over_transformers) == (3.0, 6.0, 2.0)
    assert (generate.acceptance_length, mine.acceptance_length) == (1.0, pytest.approx(4 / 3))
    assert (plain.rows_per_step, mine.rows_per_step) == (pytest.approx(4 / 3), 1.5)
    assert (mine.nodes_per_step, mine.host_syncs_per_step) == (4.0, 1.0)
    # A pass of the whole batch: 1 s for two of them; plain decoding's three take 1.5 s.
    assert mine.step_milliseconds is not None
    assert (mine.step_milliseconds["step"], mine.step_milliseconds["verify"]) == (500.0, 300.0)
    assert (generate.reference, generate.num_identical) == (f"{TRANSFORMERS}, batch 1", 2)
    assert (mine.num_identical, mine.num_compared) == (1, 2)
    assert [(name, one.place) for name, one in mine.differences] == [("p1", 1)]
    assert make_rows(contenders, prompts, settings, target)[2].num_identical is None, "no prompt was decoded by itself"
    set_rooflines([mine], contenders[2:], Hardware(bandwidth_gb_s=1.0, matmul_gflop_s=10.0))
    assert mine.roofline_share == 0.3, "1.5e9 operations take 150 ms of 500"


def speed(name: str, tree: str, tokens_per_second: float, **options: Any) -> Row:
    return Row(name, tree, tokens_per_second=tokens_per_second, over_transformers=tokens_per_second / 10, **options)


def test_the_tree_of_each_batch_size() -> None:
    rows = {
        1: [speed(TRANSFORMERS, "", 10), speed("n-grams", "chain", 9), speed("h", "chain", 20), speed("h", "auto", 30)],
        8: [
            speed(TRANSFORMERS, "", 50),
            speed(f"{PLAIN}, compiled", "", 80),
            speed("n-grams", "chain", 40),
            speed("h", "chain", 60),
            speed("h", "auto", 0, problem="no"),
            speed("h", "dynamic:4,4,16", 20),
        ],
    }
    assert {batch: row.tree for batch, row in choose_trees(rows)["h"].items()} == {1: "auto", 8: "chain"}
    grid = make_batch_grid(rows, {"target": "t", "dtype": "float32", "temperature": 0.0})
    assert grid.columns == ["decoding", "batch 1", "batch 8"]
    cells = {line[0]: line[1:] for line in grid.cells}
    assert cells["h, chain"] == ["20.0 (2.00, –)", f"60.0 (6.00, –) {MARK}"]
    assert cells["h, auto"] == [f"30.0 (3.00, –) {MARK}", "–"]
    assert cells["h, dynamic:4,4,16"][0] == "–"
    assert grid.notes[-1] == "h, fastest tree by batch size: 1 -> auto (3.00), 8 -> chain (0.75)"
