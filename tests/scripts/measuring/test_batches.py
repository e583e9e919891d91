"""Batch sizes as an axis of benchmark.py: how batches are made, what their numbers say, and the tables over them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel

from heads import create_heads
from inference import GenerationStats, NgramDrafter, Target
from scripts import benchmark
from scripts.benchmark import BenchmarkArguments
from scripts.measuring import matrix
from scripts.measuring.batches import MARK, choose_trees, make_batch_grid
from scripts.measuring.contenders import TimedDrafter
from scripts.measuring.measure import PLAIN, TRANSFORMERS, Contender, Prompt, Run, Settings, make_batches
from scripts.measuring.report import make_rows, set_rooflines
from scripts.measuring.roofline import Hardware, Work
from scripts.measuring.rows import Row
from tests.conftest import CHAT_TARGET

TURNS = ["Count to two", "The sea", "Tell me about a dog who gets lost"]


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


def stats_of(num_passes: int, row_steps: list[int], **seconds: float) -> GenerationStats:
    """row_steps: accepted tokens of each row's verify steps, one after the other."""
    stats = GenerationStats(num_verify_passes=num_passes, num_host_syncs=num_passes, num_drafted=3 * len(row_steps))
    for accepted in row_steps:
        stats.count_step(accepted)
    stats.seconds |= seconds
    return stats


def test_rows_of_a_batch_by_hand(chat_target: PreTrainedModel) -> None:
    """Two prompts together, of 4 and 2 new tokens: the second row leaves before the last pass."""
    texts = [[5, 6, 7, 8], [5, 6]]
    spent = {"prefill": 1.0, "draft": 0.2, "verify": 0.6, "total": 2.0}
    runs = {
        TRANSFORMERS: Run(texts, 2.0, 6),
        PLAIN: Run(texts, 3.0, 4, stats_of(3, [0, 0, 0, 0], prefill=1.0, verify=1.2, total=2.5)),
        "mine": Run([[5, 6, 7, 8], [5, 9]], 1.0, 3, stats_of(2, [0, 1, 0], **spent), draft_forward_seconds=0.2),
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
    assert [(one.prompt, one.position) for one in mine.differences] == [("p1", 1)]
    assert make_rows(contenders, prompts, settings, target)[2].num_identical is None, "nobody was decoded alone"
    set_rooflines([mine], contenders[2:], Hardware(bandwidth_gb_s=1.0, matmul_gflop_s=10.0))
    assert (mine.round_weight_bytes, mine.round_flops) == (1e6, 1.5e9)
    assert (mine.limit_milliseconds, mine.roofline_share) == (150.0, 0.3)


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


# From options to files.


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_run_over_batch_sizes(
    temperature: float, chat_target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of every batch has the text of its prompt alone, and what cannot do batches says so."""
    monkeypatch.setattr(matrix, "measure_hardware", lambda target: Hardware(10.0, 100.0))
    torch.manual_seed(0)
    create_heads("medusa", Target(chat_target), num_heads=2).save_pretrained(tmp_path / "untrained")
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": turn, "turns": [turn]}) + "\n" for turn in TURNS))
    # Sampled, nobody is measured alone: the reference is made.
    sizes, trees = ([2], ["chain:1"]) if temperature else ([1, 2], ["chain:1", "dynamic:2,2,4"])
    console = Console(file=io.StringIO(), width=200)
    names = ("json",) if temperature else ("json", "plot", "markdown")
    files = {name: str(tmp_path / "out" / f"report.{name}") for name in names}
    args = BenchmarkArguments(
        target=[str(CHAT_TARGET)],
        prompts=[str(path)],
        heads=[str(tmp_path / "untrained")],
        temperature=[temperature],
        batch_size=sizes,
        max_new_tokens=4,
        tree=trees,
        repeats=1,
        device="cpu",
        compile=False,
        dtype="float32",
        **files,
    )
    benchmark.run(args, console)
    reports = json.loads(Path(files["json"]).read_text())["reports"]
    assert [report["environment"]["batch"] for report in reports] == sizes
    assert [report["environment"]["num_prompts_again"] for report in reports] == [-3 % size for size in sizes]
    for size, report in zip(sizes, reports, strict=True):
        num_rows = 3 + -3 % size
        rows = {row["name"] + row["tree"]: row for row in report["rows"]}
        problem = rows.pop("transformers prompt look-up")["problem"]
        assert problem == (
            f"transformers speculates for one row at a time, and the batch has {size}" if size > 1 else ""
        )
        for name, row in rows.items():
            is_ours = not name.startswith("transformers")
            is_compared = temperature == 0 or is_ours
            assert (row["num_identical"], row["num_compared"]) == ((num_rows,) * 2 if is_compared else (None, 0)), name
            assert row["host_syncs_per_step"] == (1.0 if is_ours else None)
            assert not is_ours or 1 <= row["rows_per_step"] <= size
            assert row["num_new_tokens"] <= 4 * num_rows
            if name in (TRANSFORMERS, PLAIN):
                assert row["acceptance_length"] == 1.0
    assert "prompts from the start again" in console.file.getvalue()  # type: ignore[attr-defined]
    if temperature:
        return
    page = Path(files["markdown"]).read_text()
    for text in (f"batches of {sizes[0]}, {sizes[1]}**", "untrained, fastest tree by batch size: ", MARK):
        assert text in page
    pictures = {file.name for file in (tmp_path / "out").iterdir()} - {"report.json", "report.markdown"}
    assert pictures == {"report-1.plot", "report-2.plot", "report-batches.plot"}
