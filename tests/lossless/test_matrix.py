"""A small part of the lossless matrix: all families, drafters, policies and rules; `make lossless` runs the whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import HEAD_TYPES
from tests.lossless.matrix import __main__ as program
from tests.lossless.matrix import cases
from tests.lossless.matrix.cases import Case, run_case
from tests.lossless.matrix.cells import BATCHES, FACTORS, Cell, calls_of, makes_sense
from tests.lossless.matrix.covering import cover, pairs_of
from tests.lossless.matrix.drafters import POLICIES, RefusalError
from tests.lossless.matrix.references import reference_of
from tests.lossless.matrix.results import DIFFERENT, SAME, Result, find_gaps, run_cell
from tests.tiny_targets import FAMILIES

NEW_TOKENS = 16
# References take most of the time: one target decodes in batches of 32, there are few ways to sample, and random heads
# draft together with the scripted drafter only.
WIDE = FAMILIES[0]
REDUCED = FACTORS | {
    "drafter": tuple(name for name in FACTORS["drafter"] if name not in HEAD_TYPES),
    "sampling": ("greedy", "T=0.7", "repetition penalty 1.3"),
    "prefill_chunk": (512, 5),
}
# What is special about a family does not depend on who drafts for it.
APART = [frozenset(pair) for pair in itertools.product(["family"], ["drafter", "policy", "acceptance", "sampling"])]


def is_cheap(values: Mapping[str, Any]) -> bool:
    return makes_sense(values) and (values["batch"] != 32 or (values["family"], values["attention"]) == (WIDE, "sdpa"))


def reduced_cells() -> list[Cell]:
    cells = []
    for values in cover(REDUCED, is_cheap, apart=APART):
        batch = values.pop("batch")
        cells.append(Cell("reduced", batch, Case(calls=calls_of(batch, NEW_TOKENS), text_length=NEW_TOKENS, **values)))
    return cells


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in reduced_cells()])
def test_texts_are_those_of_plain_decoding(cell: Cell) -> None:
    try:
        outcome = run_case(cell.case)
    except RefusalError as error:
        pytest.skip(f"these heads cannot be made for this target: {error}")
    assert outcome.num_tokens > 0
    if cell.case.drafter == "scripted":
        assert outcome.stats.acceptance_length > 1.1


def greedy_cells_of(family: str) -> list[Cell]:
    return [
        Cell(
            "greedy",
            batch,
            Case(
                family,
                calls_of(batch, NEW_TOKENS),
                drafter="none" if policy == "none" else "scripted",
                policy=policy,
                text_length=NEW_TOKENS,
            ),
        )
        for policy in POLICIES
        for batch in BATCHES
    ]


def test_every_depth_rank_and_end_is_reached_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(program.PARTS, "greedy", lambda: greedy_cells_of(WIDE))
    paths = ["--json", str(tmp_path / "cells.json"), "--markdown", str(tmp_path / "page.md")]
    assert program.main(["--part", "greedy", *paths]) == 0, capsys.readouterr().out
    content = json.loads((tmp_path / "cells.json").read_text())
    assert len(content["cells"]) == len(POLICIES) * len(BATCHES)
    assert {cell["status"] for cell in content["cells"]} == {SAME}
    assert content["gaps"] == []
    tokens = sum(cell["tokens"] for cell in content["cells"])
    page = (tmp_path / "page.md").read_text()
    assert f"| tokens compared | {tokens:,} |" in page
    assert f"| {WIDE}, sdpa |" in page
    assert "| cells with another token | 0 |" in page


def test_gaps_are_found() -> None:
    results = [
        Result(cell.name, "greedy", cell.batch, WIDE, "sdpa", "scripted", str(cell.case.policy), "", "", "", 512, SAME)
        for cell in greedy_cells_of(WIDE)
    ]
    for result in results:
        result.accepted_histogram, result.by_eos, result.eos_within_step, result.num_ends = [3, 2, 1, 1, 1], 1, 1, 5
        result.offered = [[depth, rank] for depth in range(4) for rank in range(4)]
        result.trimmed = result.by_length = 1
    assert find_gaps(results) == []
    for result in results:
        result.accepted_histogram, result.offered = [3, 2, 0, 1, 1], [[0, 0], [1, 1]]
        result.by_length = result.trimmed = 0
    gaps = find_gaps(results)
    assert gaps[0] == f"{WIDE} sdpa: no cell has a row that its length ended"
    assert gaps[1] == f"{WIDE} sdpa chain: not every depth was reached: [12, 8, 0, 4, 4]"
    assert gaps[2] == f"{WIDE} sdpa chain: true tokens were offered at ranks [0, 1] only"
    assert gaps[3] == f"{WIDE} sdpa chain: no step went beyond the end of a row"
    assert len(gaps) == 1 + 3 * (len(POLICIES) - 1)


def test_a_wrong_token_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_a_wrong_token(*args: Any) -> torch.Tensor:
        text = reference_of(*args).clone()
        text[-12] = (text[-12] + 1) % 128
        return text

    monkeypatch.setattr(cases, "reference_of", with_a_wrong_token)
    for cell in greedy_cells_of(WIDE)[:8:3]:
        result = run_cell(cell)
        assert result.status == DIFFERENT
        assert result.reason is not None
        assert "has score" in result.reason


def test_options_choose_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--list", "--match", "dynamic", "batch 32", "--part", "greedy"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert names
    assert all("dynamic" in name and "batch 32" in name for name in names)
    assert program.main(["--match", "no such cell", "--part", "trained"]) == 2


def test_every_pair_of_values_that_makes_sense_occurs() -> None:
    factors = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1), "d": (0, 1)}

    def is_valid(values: Mapping[str, Any]) -> bool:
        return values["a"] != values["b"]

    design = cover(factors, is_valid, apart=[frozenset("cd")])
    every = [dict(zip("abcd", values, strict=True)) for values in itertools.product(*factors.values())]
    possible = set().union(*(pairs_of(values, [frozenset("cd")]) for values in filter(is_valid, every)))
    assert set().union(*(pairs_of(values, [frozenset("cd")]) for values in design)) == possible
    assert all(map(is_valid, design))
    assert len(design) < len(every) / 2
    assert len(cover({"a": [0, 1], "b": [0, 1], "c": [0, 1]}, lambda _: True)) == 4
