"""context.py at tiny contexts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import HfArgumentParser

from scripts.benchmarks import context
from scripts.benchmarks.context import ContextArguments
from scripts.benchmarks.context_cost import ContextCost, _interleave, build_random_target

TINY = {"layers": 4, "hidden": 32, "num_heads": 4, "kv_heads": 2, "vocab": 64, "device": "cpu", "steps": 3}


@pytest.mark.parametrize("tree", ["dynamic:2,2,4", "chain:2"])
def test_a_small_run(tree: str, tmp_path: Path) -> None:
    files = {name: str(tmp_path / "out" / f"context.{name}") for name in ("json", "plot", "markdown")}
    console = Console(file=io.StringIO(), width=200)
    # 600 tokens: two chunks of the prefill.
    rows = context.run(ContextArguments(context=[600, 8], tree=tree, **TINY, **files), console)
    report = json.loads(Path(files["json"]).read_text())
    assert [row["context"] for row in report["rows"]] == [8, 600]
    for row in report["rows"]:
        assert row["num_nodes"] == (4 if tree.startswith("dynamic") else 3)
        for name, value in row.items():
            assert value >= 0 if name == "peak_memory_mib" else value > 0, name
    environment = report["environment"]
    assert (environment["layers"], environment["heads"], environment["tree"]) == (4, "eagle3", tree)
    assert Path(files["plot"]).read_bytes().startswith(b"\x89PNG")
    markdown = Path(files["markdown"]).read_text()
    assert "| context | prefill s |" in markdown
    assert f"| 600 | {rows[1].prefill_seconds:.2f} |" in markdown
    assert "break-even" in console.file.getvalue()  # type: ignore[attr-defined]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "context.json",
        "context.markdown",
        "context.plot",
    ]


def test_break_even_counts_draft_and_verify() -> None:
    cost = ContextCost(
        context=8,
        num_nodes=4,
        prefill_seconds=1.0,
        draft_prefill_seconds=1.0,
        peak_memory_mib=1.0,
        transformers_milliseconds=5.0,
        plain_milliseconds=4.0,
        verify_milliseconds=7.0,
        draft_milliseconds=3.0,
    )
    assert cost.break_even == 2.5


def test_steps_take_turns_and_warm_up_does_not_count() -> None:
    calls: list[str] = []

    def recording(name: str) -> list[float]:
        calls.append(name)
        return [float(len(calls))]

    seconds = _interleave({"a": lambda: recording("a"), "b": lambda: recording("b")}, 2)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert seconds == {"a": [[5.0], [8.0]], "b": [[6.0], [7.0]]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "1"], "got --context 1: give one or more lengths of at least 2 tokens"),
        (["--context", "8", "8"], "got --context 8 8: give one or more lengths"),
        (["--steps", "0"], "got --steps 0: give at least 1"),
    ],
)
def test_wrong_options(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HfArgumentParser(ContextArguments).parse_args_into_dataclasses(words)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "name"), [(3, 1, "hidden_size 32"), (4, 3, "num_heads 4")])
def test_a_shape_that_does_not_divide(num_heads: int, num_kv_heads: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"got {name} for 3 .*heads: .* must be a multiple"):
        build_random_target(
            num_layers=4,
            hidden_size=32,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            vocab_size=64,
            max_length=64,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
