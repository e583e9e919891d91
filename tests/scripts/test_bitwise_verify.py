"""Passes of every shape read the same text, and what differs by design is found to differ."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.conftest import CHAT_TARGET, REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import bitwise_verify
from bitwise_factors import Finding, find_factors
from bitwise_passes import Shape, make_tree, read_text
from bitwise_render import render

from inference import Target
from tests.tiny_targets import random_prompt, tiny_target

KINDS = ("padding", "decoys", "chain", "tree", "front")


@pytest.mark.parametrize("kind", KINDS)
def test_the_path_carries_the_text(kind: str) -> None:
    text, seen = list(range(10, 40)), set()
    for seed in range(20):
        tree, path = make_tree(Shape(kind, 6), text, 3, 100, random.Random(seed))
        tokens, parents, depths = (row[0].tolist() for row in (tree.token_ids, tree.parents, tree.depths))
        assert path[0] == 0
        assert [tokens[node] for node in path] == text[3 : 3 + len(path)]
        assert [parents[node] for node in path] == [-1, *path[:-1]]
        assert [depths[node] for node in path] == list(range(len(path)))
        assert all(parent < node for node, parent in enumerate(parents))
        if kind == "padding":
            assert set(parents) == {-1}
        seen.add(tuple(path))
    is_contiguous = all(path == tuple(range(len(path))) for path in seen)
    assert is_contiguous == (kind != "tree")
    assert {len(path) for path in seen} == ({1} if kind in ("padding", "decoys") else {1, 2, 3, 4, 5, 6})


def test_every_shape_reads_the_text_as_one_pass_does() -> None:
    model = tiny_target("llama", initializer_range=0.3)
    target = Target(model)
    prompt, text = random_prompt(20)[0].tolist(), random_prompt(12, seed=1)[0].tolist()
    expected = model(torch.tensor([prompt + text])).logits[0, len(prompt) :]
    shapes = [Shape(kind, 7, view) for kind, view in zip(KINDS, (128, None, 128, None, None), strict=True)]
    for shape, refill in (*((shape, None) for shape in shapes), (Shape("tree", 7, 128), Shape("padding", 2, 128))):
        rows = read_text(target, target.verify_opened, shape, prompt, text, capacity=192, refill=refill)
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_a_finding_counts_rows_and_steps() -> None:
    finding = Finding("product", "place")
    row = torch.tensor([[16.0, 1.0], [8.0, 2.0]], dtype=torch.bfloat16)
    finding.add(row, row.clone())
    changed = row.clone()
    changed[0, 1] = 1.25
    finding.add(row, changed)
    assert (finding.num_rows, finding.num_equal, finding.max_steps) == (4, 3, 2.0)  # 0.25 beside a number of 16


def test_factors_are_told_apart(chat_target: PreTrainedModel) -> None:
    """Of a row alone, nothing but its own numbers may matter beyond rounding; the order of a sum does."""
    found = {(one.operation, one.factor): one for one in find_factors(chat_target, num_draws=1)}
    assert len(found) == len({operation for operation, _ in found}) * 9 + 3 * 6
    for (_, factor), one in found.items():
        assert one.num_rows > 0
        assert one.max_steps < 100, factor  # rounding in float32, no other attention
        if factor == "other numbers in masked slots":
            assert one.num_equal == one.num_rows
    orders = [one for (_, factor), one in found.items() if factor == "committed keys in another order"]
    assert len(orders) == 3
    assert all(one.num_equal < one.num_rows for one in orders)


def test_the_program_writes_its_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny(*_: object, dtype: str, attn_implementation: str) -> PreTrainedModel:
        options = {"dtype": getattr(torch, dtype), "attn_implementation": attn_implementation}
        return tiny_target("llama", vocab_size=4096, num_hidden_layers=2, **options)

    monkeypatch.setattr(bitwise_verify.AutoModelForCausalLM, "from_pretrained", tiny)
    monkeypatch.setattr(bitwise_verify, "REPEATS", 1)
    path, table = tmp_path / "out" / "found.json", tmp_path / "out" / "found.md"
    words = ["--target", str(CHAT_TARGET), "--prompts", str(REPOSITORY / "examples" / "prompts.jsonl")]
    words += [
        "--num_prompt_tokens",
        "20",
        "--max_new_tokens",
        "4",
        "--num_draws",
        "1",
        "--dtype",
        "bfloat16",
        "float32",
    ]
    assert bitwise_verify.main([*words, "--json", str(path), "--markdown", str(table)]) == 0
    reports = json.loads(path.read_text())["reports"]
    assert [report["environment"]["dtype"] for report in reports] == ["bfloat16", "float32"]
    assert table.read_text() == render(reports)
    for report in reports:
        assert set(report["passes"]) == {"sdpa", "eager"}
        for findings in report["passes"].values():
            assert [one["factor"] for one in findings] == [one.label for one in bitwise_verify.COMPARISONS]
            assert all(one["num_rows"] == 4 for one in findings)
        assert set(report["milliseconds"]["eager"]) == {"1", "2", "4", "5", "16"}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--dtype", "int8"], "got the dtypes int8"),
        (["--dtype", "float32", "--compiled", "bfloat16"], "got --compiled bfloat16, not among --dtype float32"),
        (["--max_new_tokens", "400"], "must fit into 512 slots"),
    ],
)
def test_options_that_cannot_work_are_refused(option: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=f"bitwise_verify.py: .*{words}"):
        bitwise_verify.main(["--target", str(CHAT_TARGET), "--prompts", "p.jsonl", *option])
