"""The results of the cells, and what all cells together must reach."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.lossless.matrix.cases import Outcome, run_case
from tests.lossless.matrix.cells import BATCHES, RECURRENT_BATCHES, Cell
from tests.lossless.matrix.drafters import DEPTH, STATIC_PATHS

SAME, NEAR_TIE, DIFFERENT = "identical", "near-tie", "DIFFERENT"
TOKENS_AT_LEAST = 500_000  # compared by a whole run
BRANCHED = ("static", "dynamic", "auto")
NUM_RANKS = 4  # real candidates of the scripted drafter


@dataclass
class Result:
    """One cell's result.

    status: one of the three words above. reason: why the cell differs. tokens to num_ends: counts of rows and verify
    steps, as in `Outcome`. accepted, moved: counts of the commits. seconds: time of decoding. reference_seconds: time
    of the reference texts that no earlier cell had computed.
    """

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
    seed: int
    status: str
    reason: str | None = None
    tokens: int = 0
    rows: int = 0
    acceptance_length: float = 1.0
    accepted_histogram: list[int] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    moved: int = 0
    trimmed: int = 0
    by_eos: int = 0
    by_length: int = 0
    eos_within_step: int = 0
    num_ends: int = 0
    ties: list[str] = field(default_factory=list)
    seconds: float = 0.0
    reference_seconds: float = 0.0


def run_cell(cell: Cell) -> Result:
    """Runs one cell. A cell that fails is reported, not raised: the other cells still run."""
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
        case.seed,
        SAME,
    )
    started = time.perf_counter()
    try:
        outcome = run_case(case)
    except AssertionError as error:
        result.status, result.reason = DIFFERENT, str(error)
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
    result.accepted = [list(path) for path in sorted(outcome.commits.paths)]
    result.moved = outcome.commits.num_moved
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


def find_gaps(results: Sequence[Result], *, is_whole: bool = False) -> list[str]:
    """Lists what the complete part should have reached and did not: every depth, every branch, every way to end.

    A whole run must also compare at least `TOKENS_AT_LEAST` tokens.
    """
    gaps = []
    if is_whole and (tokens := sum(result.tokens for result in results)) < TOKENS_AT_LEAST:
        gaps.append(f"{tokens:,} tokens were compared, and at least {TOKENS_AT_LEAST:,} are to be")
    greedy = [
        result
        for result in results
        if result.part == "greedy" or (result.part == "recurrent" and result.sampling == "greedy")
    ]
    for target in dict.fromkeys((result.family, result.attention) for result in greedy):
        own = [result for result in greedy if (result.family, result.attention) == target]
        is_smaller = own[0].part == "recurrent"  # fewer rows do not reach everything
        if {result.batch for result in own} != set(RECURRENT_BATCHES if is_smaller else BATCHES):
            continue  # a selection of cells
        name = " ".join(target)
        reached = {
            "a row that EOS ended": sum(result.by_eos for result in own),
            "a row that its length ended": sum(result.by_length for result in own),
            "an EOS before a step's last token": sum(result.eos_within_step for result in own),
            "five rows of one batch that ended at different lengths": is_smaller
            or max(result.num_ends for result in own) >= 5,
        }
        gaps += [f"{name}: no cell has {what}" for what, number in reached.items() if not number]
        for policy in dict.fromkeys(result.policy for result in own):
            if policy != "none" and not (is_smaller and policy == "auto"):
                gaps += _find_tree_gaps(
                    f"{name} {policy}", policy, [result for result in own if result.policy == policy]
                )
    return gaps


def _find_tree_gaps(name: str, policy: str, results: Sequence[Result]) -> list[str]:
    histogram = sum_histograms(results)
    gaps = []
    if len(histogram) != DEPTH + 1 or min(histogram) == 0:
        gaps.append(f"{name}: not every depth was reached: {histogram}")
    if missing := find_missing_branches(policy, {tuple(path) for result in results for path in result.accepted}):
        gaps.append(f"{name}: never accepted: {', '.join(missing)}")
    if policy in BRANCHED and not sum(result.moved for result in results):
        gaps.append(f"{name}: no step moved slots")
    if not sum(result.trimmed for result in results):
        gaps.append(f"{name}: no step went beyond the end of a row")
    return gaps


def find_missing_branches(policy: str, accepted: set[tuple[int, ...]]) -> list[str]:
    """Lists the nodes of a policy's trees that no step accepted.

    Chains and static trees: every node. Dynamic trees keep the best nodes only, never the worst rank at the last depth:
    the best two ranks of each depth, and every rank at some depth. `accepted` holds the rank paths of accepted nodes.
    """
    if policy in ("dynamic", "auto"):
        places = {(len(path), path[-1]) for path in accepted}
        wanted = [(depth, rank) for depth in range(1, DEPTH + 1) for rank in (0, 1)]
        missing = [f"rank {rank} at depth {depth}" for depth, rank in wanted if (depth, rank) not in places]
        return missing + [f"rank {rank}" for rank in range(2, NUM_RANKS) if rank not in {rank for _, rank in places}]
    nodes = STATIC_PATHS if policy == "static" else [[0] * depth for depth in range(1, DEPTH + 1)]
    return [f"node {list(node)}" for node in nodes if tuple(node) not in accepted]


def to_json(results: Sequence[Result]) -> str:
    """One line for each cell, so that `diff` compares two runs."""
    lines = []
    for result in results:
        values = asdict(result)
        values["seconds"], values["reference_seconds"] = round(result.seconds, 3), round(result.reference_seconds, 3)
        lines.append(json.dumps(values))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def from_json(text: str) -> list[Result]:
    """Reads what `to_json` wrote."""
    return [Result(**values) for values in json.loads(text)]


def write_text(path: Path, text: str) -> None:
    """Writes a file in one step: a reader sees the old text or the new text, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
