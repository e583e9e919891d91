"""A small part of the lossless matrix: all families, drafters, policies and rules; `make lossless` runs the whole."""

import itertools
import re

import pytest

from draftsmith.heads import HEAD_TYPES
from tests.lossless.matrix import __main__ as program
from tests.lossless.matrix.cases import Case, run_case
from tests.lossless.matrix.cells import BATCHES, FACTORS, Cell, calls_of, makes_sense, seed_of
from tests.lossless.matrix.covering import cover
from tests.lossless.matrix.results import TOKENS_AT_LEAST
from tests.tiny_targets import LEFT_OUT

NEW_TOKENS = 16
# References take most of the time: there are no batches of 32, few ways to sample, and random heads draft together with
# the scripted drafter only.
REDUCED = FACTORS | {
    "drafter": tuple(name for name in FACTORS["drafter"] if name not in HEAD_TYPES),
    "sampling": ("greedy", "T=0.7", "repetition penalty 1.3"),
    "batch": BATCHES[:-1],
    "prefill_chunk": (512, 5),
}
# What is special about a family does not depend on who drafts for it.
APART = [frozenset(pair) for pair in itertools.product(["family"], ["drafter", "policy", "acceptance", "sampling"])]


def reduced_cells() -> list[Cell]:
    cells = []
    for values in cover(REDUCED, makes_sense, apart=APART):
        batch = values.pop("batch")
        values["seed"] = seed_of(values["family"], values["attention"])
        cells.append(Cell("reduced", batch, Case(calls=calls_of(batch, NEW_TOKENS), text_length=NEW_TOKENS, **values)))
    return sorted(cells, key=lambda cell: cell.case.family)  # one worker then makes a family's references


# By default every third; they are sorted by family, so each family has one.
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=cell.name, marks=pytest.mark.slow if place % 3 else ())
        for place, cell in enumerate(reduced_cells())
    ],
)
def test_texts_are_those_of_plain_decoding(cell: Cell) -> None:
    outcome = run_case(cell.case)
    assert outcome.num_tokens > 0
    if cell.case.drafter == "scripted":
        assert outcome.stats.acceptance_length > 1.1


def read_totals(page: str) -> dict[str, int]:
    rows = re.findall(r"^\| ([\w -]+) \| ([\d,]+) \|$", page, re.M)
    return {name: int(number.replace(",", "")) for name, number in rows}


@pytest.mark.skipif(
    bool(LEFT_OUT), reason=f"the published run has families that this release of transformers lacks: {LEFT_OUT}"
)
def test_the_published_run_is_of_these_cells_and_found_nothing() -> None:
    found, cells = read_totals(program.PAGE.read_text()), program.choose_cells(program.parse_arguments([]))
    assert found["cells"] == len(cells), "the code has other cells than the published run: make lossless"
    assert found["cells with a different token"] == found["required places that no step reached"] == 0
    assert found["tokens compared"] >= TOKENS_AT_LEAST
