"""The cost of verifying drafts on a target with recurrent layers: a tiny run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.scripts.benchmarks.recurrent import RecurrentArguments, run
from tests.tiny_targets import RECURRENT_FAMILIES


@pytest.mark.skipif(not RECURRENT_FAMILIES, reason="this release of transformers has no cache for states")
def test_a_tiny_run(tmp_path: Path) -> None:
    sizes = {"num_layers": 4, "hidden_size": 256, "vocab_size": 64, "context": 16, "num_rounds": 1}
    text = io.StringIO()
    args = RecurrentArguments(**sizes, dtype="float32", tree="2,1", output=str(tmp_path))
    ratios = run(args, Console(file=text, width=100))
    assert {kind: set(steps) for kind, steps in ratios.items()} == {
        kind: {"plain", "chain of 4", "tree of 4"} for kind in ("recurrent", "attention")
    }
    assert "tree of 4" in text.getvalue()
    assert json.loads((tmp_path / "recurrent.json").read_text())["ratios"] == ratios


def test_wrong_sizes() -> None:
    with pytest.raises(ValueError, match="a multiple of 4"):
        RecurrentArguments(num_layers=5)
