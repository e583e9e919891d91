"""The results of the cells, and what all cells together must reach."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.lossless.matrix.cases import Outcome, run_case
from tests.lossless.matrix.cells import BATCHES, RECURRENT_BATCHES, Cell
from tests.lossless.matrix.drafters import DEPTH, STATIC_PATHS
from tests.lossless.matrix.served import run_served

SAME, NEAR_TIE, DIFFERENT = "identical", "near-tie", "DIFFERENT"
TOKENS_AT_LEAST = 500_000  # compared by a whole run
BRANCHED = ("static", "dynamic", "auto")
NUM_RANKS = 4  # real candidates of the scripted drafter


@dataclass
class Result:
    """Of a cell. status: one of the three words above. reason: why the cell differs."""

    cell: Cell
    status: str
    outcome: Outcome = field(default_factory=Outcome)
    reason: str | None = None


def run_cell(cell: Cell) -> Result:
    """Runs one cell. A cell that fails is reported, not raised: the other cells still run."""
    try:
        outcome = run_served(cell) if cell.part == "served" else run_case(cell.case)
    except AssertionError as error:
        return Result(cell, DIFFERENT, reason=str(error))
    except Exception as error:  # noqa: BLE001  a crash is a failure of this cell, and is reported as one
        return Result(cell, DIFFERENT, reason=f"{type(error).__name__}: {error}")
    return Result(cell, NEAR_TIE if outcome.ties else SAME, outcome)


def sum_histograms(results: Iterable[Result]) -> list[int]:
    total: list[int] = []
    for result in results:
        histogram = result.outcome.stats.accepted_histogram
        total += [0] * (len(histogram) - len(total))
        for accepted, steps in enumerate(histogram):
            total[accepted] += steps
    return total


def find_gaps(results: Sequence[Result], *, is_whole: bool = False) -> list[str]:
    """Lists what the complete part should have reached and did not: every depth, every branch, every way to end.

    A whole run must also compare at least `TOKENS_AT_LEAST` tokens.
    """
    gaps = []
    if is_whole and (tokens := sum(result.outcome.num_tokens for result in results)) < TOKENS_AT_LEAST:
        gaps.append(f"{tokens:,} tokens were compared, and at least {TOKENS_AT_LEAST:,} are to be")
    greedy: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        cell, case = result.cell, result.cell.case
        if cell.part == "greedy" or (cell.part == "recurrent" and case.sampling == "greedy"):
            greedy.setdefault((case.family, case.attention), []).append(result)
    for target, own in greedy.items():
        is_smaller = own[0].cell.part == "recurrent"  # fewer rows do not reach everything
        if {result.cell.batch for result in own} != set(RECURRENT_BATCHES if is_smaller else BATCHES):
            continue  # a selection of cells
        name, outcomes = " ".join(target), [result.outcome for result in own]
        reached = {
            "a row that EOS ended": sum(one.by_eos for one in outcomes),
            "a row that its length ended": sum(one.by_length for one in outcomes),
            "an EOS before a step's last token": sum(one.eos_within_step for one in outcomes),
            "five rows of one batch that ended at different lengths": is_smaller
            or max(one.num_ends for one in outcomes) >= 5,
        }
        gaps += [f"{name}: no cell has {what}" for what, number in reached.items() if not number]
        policies: dict[str, list[Result]] = {}
        for result in own:
            policies.setdefault(str(result.cell.case.policy), []).append(result)
        for policy, found in policies.items():
            if policy != "none" and not (is_smaller and policy == "auto"):
                gaps += _find_tree_gaps(f"{name} {policy}", policy, found)
    return gaps


def _find_tree_gaps(name: str, policy: str, results: Sequence[Result]) -> list[str]:
    histogram, outcomes = sum_histograms(results), [result.outcome for result in results]
    gaps = []
    if len(histogram) != DEPTH + 1 or min(histogram) == 0:
        gaps.append(f"{name}: not every depth was reached: {histogram}")
    if missing := find_missing_branches(policy, set().union(*(one.commits.paths for one in outcomes))):
        gaps.append(f"{name}: never accepted: {', '.join(missing)}")
    if policy in BRANCHED and not sum(one.commits.num_moved for one in outcomes):
        gaps.append(f"{name}: no step moved slots")
    if not sum(one.trimmed for one in outcomes):
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
