"""Heads continued on a fine-tuned target: the configurations of its runs, and the program from end to end."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from draftsmith.scripts.benchmarks.training.continuing import ContinuingArguments, fine_tune, run, write_configs
from draftsmith.training.options.command_line import parse_arguments
from tests.conftest import CHAT_TARGET, REPOSITORY

CONVERSATIONS = REPOSITORY / "examples" / "conversations.jsonl.gz"


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContinuingArguments:
    """Forty short conversations, four of them held out; a step or two of everything."""
    monkeypatch.chdir(REPOSITORY)
    with gzip.open(CONVERSATIONS, "rt", encoding="utf-8") as file:
        lines = [next(file) for _ in range(40)]
    (tmp_path / "c.jsonl").write_text("".join(lines), encoding="utf-8")
    sizes = {"num_steps": 2, "step_size": 2, "num_replies": 20, "num_prompts": 4, "max_new_tokens": 8}
    return ContinuingArguments(conversations=str(tmp_path / "c.jsonl"), output=str(tmp_path / "out"), **sizes)


def test_every_line_of_the_table_has_a_configuration(args: ContinuingArguments, tmp_path: Path) -> None:
    found = {}
    for path in write_configs(args, 200, tmp_path):
        model, data, *_ = parse_arguments(["--config", path, "--use_cpu", "true"])
        found[Path(path).stem] = (model.head_type, model.init_heads, data.max_samples)
    assert found.pop("unchanged")[0] == "eagle3"
    assert found == {
        "continued-10%": (None, "examples/heads/eagle3", 20),
        "anew-10%": ("eagle3", None, 20),
        "anew-100%": ("eagle3", None, 200),
    }


@pytest.mark.slow
def test_fine_tuning_keeps_shape_and_dtype_and_changes_the_weights(args: ContinuingArguments, tmp_path: Path) -> None:
    fine_tune(args, Path(args.conversations), tmp_path / "target")
    before, after = (load_file(folder / "model.safetensors") for folder in (CHAT_TARGET, tmp_path / "target"))
    assert {name: (x.shape, x.dtype) for name, x in after.items()} == {
        name: (x.shape, x.dtype) for name, x in before.items()
    }
    changed = [name for name, x in after.items() if not torch.equal(x, before[name])]
    assert len(changed) > 100


@pytest.mark.slow
def test_the_table(args: ContinuingArguments) -> None:
    results = run(args, Console(quiet=True))
    assert list(results) == ["unchanged", "continued-10%", "anew-10%", "anew-100%"]
    assert all(one["acceptance"]["dynamic:6,4,24"]["0"]["acceptance_length"] >= 1 for one in results.values())
    tokens = {name: one["training"].get("tokens", 0) for name, one in results.items()}
    assert tokens["unchanged"] == 0 < tokens["continued-10%"] == tokens["anew-10%"] < tokens["anew-100%"]
    assert json.loads((Path(args.output) / "ablation.json").read_text())["results"] == results
