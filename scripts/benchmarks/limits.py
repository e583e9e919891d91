"""How near a row comes to what it could be: the ideal speed-up of its drafts, and the hardware's roofline.

Everything here is per verify step and leaves the prefill out, on both sides of every division.
"""

from __future__ import annotations

from collections.abc import Sequence

from scripts.benchmarks.measure import PLAIN, Contender
from scripts.benchmarks.roofline import Hardware, Work
from scripts.benchmarks.rows import Row


def set_ideals(rows: Sequence[Row], contenders: Sequence[Contender]) -> None:
    """Fills in, for every row of ours whose plain decoding was measured in the same mode (eager rows beside eager plain
    decoding, compiled ones beside compiled),

        step_speedup  = tokens x plain decoding's whole step / the row's whole step
        ideal_speedup = tokens x plain decoding's verify time / (the row's verify + draft time)
        ideal_share   = step_speedup / ideal_speedup

    with the milliseconds per step of `Row.step_milliseconds`, and tokens a step's beside plain decoding's: acceptance
    length, times rows_per_step / plain decoding's rows_per_step, since batches empty at different steps. So the ideal
    has no overhead anywhere: trees that grow by themselves, acceptance and commits for nothing. The share can pass 1
    when plain decoding loses more to its own overhead. In a compiled row growing the tree is part of the draft time.
    """
    plain_rows = {
        contender.is_compiled: row
        for row, contender in zip(rows, contenders, strict=True)
        if contender.name.removesuffix(", compiled") == PLAIN
    }
    for row, contender in zip(rows, contenders, strict=True):
        plain_row = plain_rows.get(contender.is_compiled)
        if (
            plain_row is None
            or (own := row.step_milliseconds) is None
            or (plain := plain_row.step_milliseconds) is None
        ):
            continue
        tokens = row.acceptance_length * (row.rows_per_step or 1.0) / (plain_row.rows_per_step or 1.0)
        row.step_speedup = tokens * plain["step"] / own["step"]
        row.ideal_speedup = tokens * plain["verify"] / (own["verify"] + own["draft"])
        row.ideal_share = row.step_speedup / row.ideal_speedup


def set_rooflines(rows: Sequence[Row], contenders: Sequence[Contender], hardware: Hardware) -> None:
    """Fills in the work of a round, the hardware's limit for it, and limit / measured time of a whole step.

    A round reads the weights once for all rows, and multiplies for each row that has not ended.
    """
    for row, contender in zip(rows, contenders, strict=True):
        if contender.work is None or row.step_milliseconds is None:
            continue
        work = Work(contender.work.weight_bytes, contender.work.flops * (row.rows_per_step or 1.0))
        row.round_weight_bytes, row.round_flops = work.weight_bytes, work.flops
        row.limit_milliseconds = work.limit_milliseconds(hardware)
        row.roofline_share = row.limit_milliseconds / row.step_milliseconds["step"]
