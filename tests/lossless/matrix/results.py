"""What cells showed, what all of them together must have reached, and the two files it is written to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.lossless.matrix.cases import Outcome, run_case
from tests.lossless.matrix.cells import BATCHES, Cell
from tests.lossless.matrix.drafters import DEPTH, RefusalError

SAME, NEAR_TIE, REFUSED, DIFFERENT = "identical", "near-tie", "refused", "DIFFERENT"


@dataclass
class Result:
    """One cell. status: one of the four above; reason: of a refusal or a difference. The rest is `Outcome`'s, of rows
    and verify steps; seconds: of decoding, reference_seconds: of texts that no earlier cell had asked for."""

    name: str
    part: str
    batch: int
    family: str
    attention: str
    drafter: str
    policy: str
    acceptance: str
    sampling: str
    padding: str
    prefill_chunk: int
    status: str
    reason: str | None = None
    tokens: int = 0
    rows: int = 0
    acceptance_length: float = 1.0
    accepted_histogram: list[int] = field(default_factory=list)
    offered: list[list[int]] = field(default_factory=list)
    trimmed: int = 0
    by_eos: int = 0
    by_length: int = 0
    eos_within_step: int = 0
    num_ends: int = 0
    ties: list[str] = field(default_factory=list)
    seconds: float = 0.0
    reference_seconds: float = 0.0


def run_cell(cell: Cell) -> Result:
    """Never raises for a cell that fails: the others are to be run as well."""
    case = cell.case
    result = Result(
        cell.name,
        cell.part,
        cell.batch,
        case.family,
        case.attention,
        case.drafter,
        str(case.policy),
        case.acceptance,
        case.sampling,
        case.padding,
        case.prefill_chunk,
        SAME,
    )
    started = time.perf_counter()
    try:
        outcome = run_case(case)
    except AssertionError as error:
        result.status, result.reason = DIFFERENT, str(error)
    except RefusalError as error:
        result.status, result.reason = REFUSED, str(error)
    except Exception as error:  # noqa: BLE001  a crash is a failure of this cell, and is reported as one
        result.status, result.reason = DIFFERENT, f"{type(error).__name__}: {error}"
    else:
        _take(result, outcome)
    result.seconds = time.perf_counter() - started - result.reference_seconds
    return result


def _take(result: Result, outcome: Outcome) -> None:
    result.status = NEAR_TIE if outcome.ties else SAME
    result.ties = outcome.ties
    result.tokens, result.rows = outcome.num_tokens, outcome.num_rows
    result.acceptance_length = round(outcome.stats.acceptance_length, 3)
    result.accepted_histogram = outcome.stats.accepted_histogram
    result.offered = [list(place) for place in sorted(outcome.offered)]
    result.trimmed, result.by_eos, result.by_length = outcome.trimmed, outcome.by_eos, outcome.by_length
    result.eos_within_step, result.num_ends = outcome.eos_within_step, outcome.num_ends
    result.reference_seconds = outcome.reference_seconds


def sum_histograms(results: Iterable[Result]) -> list[int]:
    total: list[int] = []
    for result in results:
        total += [0] * (len(result.accepted_histogram) - len(total))
        for accepted, steps in enumerate(result.accepted_histogram):
            total[accepted] += steps
    return total


def find_gaps(results: Sequence[Result]) -> list[str]:
    """What the complete part should have reached and has not: every depth, every rank, every way to end."""
    gaps = []
    greedy = [result for result in results if result.part == "greedy"]
    for target in dict.fromkeys((result.family, result.attention) for result in greedy):
        own = [result for result in greedy if (result.family, result.attention) == target]
        if {result.batch for result in own} != set(BATCHES):
            continue  # a selection of cells
        name = " ".join(target)
        reached = {
            "a row that EOS ended": sum(result.by_eos for result in own),
            "a row that its length ended": sum(result.by_length for result in own),
            "an EOS before a step's last token": sum(result.eos_within_step for result in own),
            "five rows of one batch that ended at different lengths": max(result.num_ends for result in own) >= 5,
        }
        gaps += [f"{name}: no cell has {what}" for what, number in reached.items() if not number]
        for policy in dict.fromkeys(result.policy for result in own):
            if policy != "none":
                gaps += _find_tree_gaps(f"{name} {policy}", [result for result in own if result.policy == policy])
    return gaps


def _find_tree_gaps(name: str, results: Sequence[Result]) -> list[str]:
    histogram = sum_histograms(results)
    ranks = {rank for result in results for _, rank in result.offered}
    gaps = []
    if len(histogram) != DEPTH + 1 or min(histogram) == 0:
        gaps.append(f"{name}: not every depth was reached: {histogram}")
    if ranks != {0, 1, 2, 3}:
        gaps.append(f"{name}: true tokens were offered at ranks {sorted(ranks)} only")
    if not sum(result.trimmed for result in results):
        gaps.append(f"{name}: no step went beyond the end of a row")
    return gaps


def to_dict(result: Result) -> dict[str, object]:
    values = asdict(result)
    values["seconds"], values["reference_seconds"] = round(result.seconds, 3), round(result.reference_seconds, 3)
    return values


def write_text(path: Path, text: str) -> None:
    """Never half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
