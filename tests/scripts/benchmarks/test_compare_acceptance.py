"""The table of acceptance rules, on two prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from heads import create_heads
from inference import Target
from scripts.benchmarks import compare_acceptance
from scripts.benchmarks.compare_acceptance import RULES, AcceptanceArguments
from tests.conftest import CHAT_TARGET

COLUMNS = ["drafter", "tree", "T", *RULES]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": str(n), "turns": [f"Count to {n}"]}) + "\n" for n in range(2)))
    return str(path)


def read_table(text: str) -> list[dict[str, str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()]
    assert lines[0] == COLUMNS
    return [dict(zip(COLUMNS, line, strict=True)) for line in lines[2:]]


def test_every_drafter_tree_and_temperature_is_a_row(
    chat_target: PreTrainedModel, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    create_heads("medusa", Target(chat_target), num_heads=2).save_pretrained(tmp_path / "medusa")
    tree = tmp_path / "pair.yaml"
    tree.write_text("paths: [[0], [1]]\n")
    markdown = tmp_path / "out" / "table.md"
    options = {
        "--target": [str(CHAT_TARGET)],
        "--heads": [str(tmp_path / "medusa")],
        "--drafter_model": [str(CHAT_TARGET)],
        "--ngrams": [],
        "--prompts": [prompts],
        "--tree": ["chain:2", str(tree)],
        "--temperature": ["0.7", "1"],
        "--num_prompts": ["1"],
        "--num_seeds": ["1"],
        "--max_new_tokens": ["6"],
        "--markdown": [str(markdown)],
    }
    compare_acceptance.main([word for name, values in options.items() for word in (name, *values)])
    rows = read_table(markdown.read_text())
    assert markdown.read_text() in capsys.readouterr().out
    names = ("medusa", "small model", "n-grams")
    expected = [(name, shape, t) for name in names for shape in ("chain:2", "pair") for t in ("0.7", "1")]
    assert [(row["drafter"], row["tree"], row["T"]) for row in rows] == expected
    for row in rows:
        for rule in RULES:
            is_judged = rule != "block_verification" or row["tree"] == "chain:2"
            assert (row[rule] != "–") == is_judged
            if is_judged:
                assert 1 <= float(row[rule].split(" ± ")[0]) <= 3
    # The target drafts for itself: p and q are the same.
    perfect = next(row for row in rows if (row["drafter"], row["tree"], row["T"]) == ("small model", "chain:2", "1"))
    for rule in ("exact", "rejection", "block_verification"):
        assert float(perfect[rule].split(" ± ")[0]) > 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": [0.0]}, "got --temperature 0.0: give numbers above 0"),
        ({"max_new_tokens": 1}, "--max_new_tokens 1"),
        ({"heads": []}, "nothing that drafts"),
    ],
)
def test_options_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AcceptanceArguments(**({"target": "t", "prompts": "p", "heads": ["h"]} | changes))


def test_trees_of_no_fixed_shape_are_refused(prompts: str) -> None:
    words = ["--target", str(CHAT_TARGET), "--ngrams", "--prompts", prompts, "--tree", "dynamic"]
    with pytest.raises(SystemExit, match="got --tree dynamic: rules are compared on trees of a fixed shape"):
        compare_acceptance.main(words)
