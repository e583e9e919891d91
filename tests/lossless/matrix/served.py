"""Rows that come to a server at random while others run, compared with the texts that they get by themselves."""

from unittest.mock import patch

from draftsmith.inference.serving.scheduler import Limits, Scheduler
from tests.inference.serving.arrivals import draw_arrivals, end, serve
from tests.lossless.matrix.cases import Outcome
from tests.lossless.matrix.cells import AT_ONCE, Cell
from tests.lossless.matrix.drafters import drafter_of
from tests.lossless.matrix.references import target_of
from tests.lossless.restless import RestlessPlanner

NUM_ROWS = 14  # more than there is room for
LIMITS = Limits(max_rows=AT_ONCE, max_length=200, max_waiting=NUM_ROWS)


def run_served(cell: Cell) -> Outcome:
    """
    Raises:
        AssertionError: for a text that differs.
    """
    case, outcome = cell.case, Outcome(num_rows=NUM_ROWS)
    target = target_of(*case.source, case.dtype)
    drafter = drafter_of(case.drafter, *case.source, case.dtype)
    assert drafter is not None
    arrivals = draw_arrivals(target, NUM_ROWS)
    planner = patch("draftsmith.inference.decoder.Planner", lambda trees, *_, **__: RestlessPlanner(trees))
    with planner, patch("draftsmith.inference.state.CATCH_UP", 5):
        scheduler = Scheduler(target, {"draft": drafter}, tree=str(case.policy), limits=LIMITS)
        try:
            serve(scheduler, arrivals)
        finally:
            end(scheduler)
    for number, arrival in enumerate(arrivals):
        expected = arrival.alone()
        assert arrival.tokens == expected, f"row {number}: {arrival.tokens}, and by itself {expected}"
        outcome.num_tokens += len(expected)
    return outcome
