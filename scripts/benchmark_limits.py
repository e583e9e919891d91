"""How near a row comes to what it could be: the ideal speed-up of its drafts, and the hardware's roofline.

Everything here is per verify step and leaves the prefill out, on both sides of every division.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmark_measure import PLAIN, Contender
from roofline import Hardware

if TYPE_CHECKING:
    from benchmark_report import Row


def set_ideals(rows: Sequence[Row], contenders: Sequence[Contender]) -> None:
    """Fills in, for every row of ours whose plain decoding was measured in the same mode (eager rows beside eager plain
    decoding, compiled ones beside compiled),

        step_speedup  = acceptance length x plain decoding's whole step / the row's whole step
        ideal_speedup = acceptance length x plain decoding's verify time / (the row's verify + draft time)
        ideal_share   = step_speedup / ideal_speedup

    with the milliseconds per step of `Row.step_milliseconds`. So the ideal has no overhead anywhere: trees that grow by
    themselves, acceptance and commits for nothing. The share can pass 1 when plain decoding loses more to its own
    overhead. In a compiled row growing the tree is part of the draft time.
    """
    plain_steps = {
        contender.is_compiled: row.step_milliseconds
        for row, contender in zip(rows, contenders, strict=True)
        if contender.name.removesuffix(", compiled") == PLAIN
    }
    for row, contender in zip(rows, contenders, strict=True):
        own, plain = row.step_milliseconds, plain_steps.get(contender.is_compiled)
        if own is None or plain is None:
            continue
        row.step_speedup = row.acceptance_length * plain["step"] / own["step"]
        row.ideal_speedup = row.acceptance_length * plain["verify"] / (own["verify"] + own["draft"])
        row.ideal_share = row.step_speedup / row.ideal_speedup


def set_rooflines(rows: Sequence[Row], contenders: Sequence[Contender], hardware: Hardware) -> None:
    """Fills in the work of a round, the hardware's limit for it, and limit / measured time of a whole step."""
    for row, contender in zip(rows, contenders, strict=True):
        if contender.work is None or row.step_milliseconds is None:
            continue
        row.round_weight_bytes, row.round_flops = contender.work.weight_bytes, contender.work.flops
        row.limit_milliseconds = contender.work.limit_milliseconds(hardware)
        row.roofline_share = row.limit_milliseconds / row.step_milliseconds["step"]
