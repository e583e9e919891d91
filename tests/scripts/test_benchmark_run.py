"""benchmark.py from its options to its files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, HfArgumentParser

from draftsmith.heads import create_heads
from draftsmith.scripts import benchmark
from draftsmith.scripts.benchmark import BenchmarkArguments
from draftsmith.scripts.measuring.measure import PLAIN, TRANSFORMERS


@pytest.fixture(scope="module")
def heads_path(small_chat: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("heads") / "untrained"
    create_heads("medusa", AutoModelForCausalLM.from_pretrained(small_chat).eval(), num_heads=2).save_pretrained(path)
    return path


def decode_all(**options: Any) -> tuple[list[dict[str, Any]], str]:
    console = Console(file=io.StringIO(), width=150)
    settings = {"device": "cpu", "compile": False, "dtype": "float32", "minutes": 0.0, **options}
    reports = benchmark.run(BenchmarkArguments(**settings), console)
    return reports, console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_over_batch_sizes(small_chat: str, heads_path: Path, prompts: Path, tmp_path: Path) -> None:
    """Every row of every batch has the text that its prompt gets by itself; contenders without batches say so."""
    sizes, trees = [1, 2], ["chain:1", "dynamic:2,2,4"]
    files = {name: str(tmp_path / "out" / f"report.{name}") for name in ("json", "markdown")}
    _, printed = decode_all(
        target=small_chat,
        prompts=[str(prompts)],
        heads=[str(heads_path)],
        temperature=[0.0],
        batch_size=sizes,
        max_new_tokens=4,
        tree=trees,
        repeats=1,
        **files,
    )
    reports = json.loads(Path(files["json"]).read_text())["reports"]
    for size, report in zip(sizes, reports, strict=True):
        environment, num_rows = report["environment"], 3 + -3 % size
        assert (environment["batch"], environment["num_prompts_again"]) == (size, -3 % size)
        assert (environment["dtype"], environment["num_prompts"]) == ("float32", 3)
        rows = {row["name"] + row["tree"]: row for row in report["rows"]}
        assert {TRANSFORMERS, PLAIN, "n-gram drafterchain:1", *(f"untrained{tree}" for tree in trees)} <= rows.keys()
        problem = rows["transformers prompt look-up"]["problem"]
        if size > 1:
            assert problem == f"transformers speculates only for single rows, and the batch has {size}"
            del rows["transformers prompt look-up"]
        for name, row in rows.items():
            is_ours = not name.startswith("transformers")
            assert row["num_identical"] == row["num_compared"] == num_rows, name
            assert row["host_syncs_per_step"] == (1.0 if is_ours else None)
            assert not is_ours or 1 <= row["rows_per_step"] <= size
            assert row["num_new_tokens"] <= 4 * num_rows
            assert min(row["tokens_per_second"], row["over_transformers"], row["warm_up_seconds"]) > 0
            if name in (TRANSFORMERS, PLAIN):
                assert row["acceptance_length"] == 1.0
    for text in ("of the first prompts; they count", "untrained, chain:1", "Fastest drafter: ", "Wrote "):
        assert text in printed
    page = Path(files["markdown"]).read_text()
    for text in ("× generate", "× fastest plain", "overhead", "untrained, chain:1"):
        assert f"| {text} |" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "0", "-1"], "--temperature -1.0"),
        (["--acceptance", "rejection"], "--acceptance rejection"),
        (["--batch_size", "2", "2"], "--batch_size 2 2"),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl"),
    ],
)
def test_wrong_options(words: list[str], message: str, prompts: Path) -> None:
    parser = HfArgumentParser(BenchmarkArguments)
    with pytest.raises(ValueError, match=message):
        parser.parse_args_into_dataclasses(["--target", "t", "--prompts", str(prompts), *words])
